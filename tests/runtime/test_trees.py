"""Draft trees through the real models: the text, the caches, batches, shadows, the record."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import assert_cache_is_fresh, greedy_text
from test_eagle import LAYERS, VOCABULARY, features_of, random_weights
from tiny_models import ATTENTION, VOCAB, build, small_lm
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.drafter import Draft, Drafter, check_draft
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.eagle.tree import (
    DynamicTree,
    EagleTree,
    StaticTree,
    TreeShape,
    make_tree,
)
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.registry import make_pool
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.ragged import RaggedModel, refuse_ragged
from metasd_runtime.model.target import CachedModel, Target

PROMPT = [5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]
NO_TREES = {"bloom, alibi"}


def is_tree(parents: Sequence[int]) -> bool:
    return list(parents) != list(range(-1, len(parents) - 1))


trees = st.lists(st.integers(0, 10**6), min_size=2, max_size=9).map(
    lambda numbers: [number % (i + 1) - 1 for i, number in enumerate(numbers)]
)


class Guesses(Drafter):
    """A tree whose tokens are the target's on one path, and junk elsewhere."""

    def __init__(self, name: str, answer: Sequence[int], parents: Sequence[int], path: int) -> None:
        self.name, self.answer, self.parents = name, answer, list(parents)
        self.line = Draft([0] * len(parents), parents=self.parents).path(path % len(parents))

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        right = self.answer[len(tokens) :]
        drafted = []
        for node in range(len(self.parents)):
            depth = self.line.index(node) if node in self.line else None
            hit = depth is not None and depth < len(right)
            drafted.append(right[depth] if hit else (7 * node + len(tokens)) % VOCAB)
        return cut(Draft(drafted, parents=self.parents), n)


def cut(draft: Draft, n: int) -> Draft:
    """No deeper than n."""
    kept = [i for i in range(len(draft.tokens)) if len(draft.path(i)) <= n]
    place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    parents = [place[draft.lineage[i]] for i in kept]
    return Draft([draft.tokens[i] for i in kept], parents=parents)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build(*ATTENTION["llama, grouped queries"])


@pytest.mark.parametrize("architecture", [a for a in ATTENTION if a not in NO_TREES])
def test_greedy_output_is_plain_generates(architecture: str) -> None:
    """Every architecture that takes a mask; trees, chains and all at once."""
    model = build(*ATTENTION[architecture])
    answer = greedy_text(model, PROMPT, 40)
    lm = LanguageModel(small_lm(), VOCAB)
    pool = [
        Guesses("one", answer, [-1, -1, 0, 1, 1, 3, 3], 5),
        Guesses("two", answer, [-1, 0, -1, 2, 3, 4, 0, 2], 5),
        lm,
    ]
    metasd = MetaSD(model, drafters=pool, policy="uniform", reward="bd")
    ids = torch.tensor([PROMPT])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for draft_all in (False, True):
            out = metasd.generate(
                ids, max_new_tokens=24, seed=3, draft_all=draft_all, return_dict_in_generate=True
            )
            assert out.sequences[0].tolist() == answer[: len(PROMPT) + 24]
            assert out.statistics.tokens_per_round > 2.0


@pytest.mark.parametrize("architecture", NO_TREES)
def test_a_model_that_cannot_read_a_tree_is_refused_by_name(architecture: str) -> None:
    model = build(*ATTENTION[architecture])
    with pytest.raises(ConfigError, match=r"BloomForCausalLM cannot read a draft tree.*chains"):
        MetaSD(model, drafters=["suffix"], draft_all=True)
    metasd = MetaSD(model, drafters=[Guesses("tree", PROMPT, [-1, -1], 0)], reward="bd")
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        metasd.generate([PROMPT], max_new_tokens=4)


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(0, 8), st.integers(0, 30))
def test_the_cache_after_a_commit_is_a_fresh_runs(
    llama: Any, parents: list[int], node: int, before: int
) -> None:
    """Any tree, any path of it that stands; and the logits were those of the path's own text."""
    target = Target(llama)
    text = [(5 * i + 1) % VOCAB for i in range(before)]
    target.prefill(text)
    tokens = [(11 * i + 2) % VOCAB for i in range(len(parents) + 1)]
    draft = Draft(tokens[1:], parents=parents)
    forward = target.forward(tokens, parents=parents if is_tree(parents) else None, features=LAYERS)
    path = draft.path(node % len(parents))
    rows = [0, *(i + 1 for i in path)]
    target.keep(len(tokens), rows)
    text += [tokens[row] for row in rows]
    assert_cache_is_fresh(target, text)
    fresh = CachedModel(llama).forward(text, features=LAYERS)
    torch.testing.assert_close(forward.logits[rows], fresh.logits[before:], atol=1e-4, rtol=1e-4)
    features = forward.features_at(rows)
    assert features is not None
    assert fresh.features is not None
    torch.testing.assert_close(features, fresh.features[before:], atol=1e-4, rtol=1e-4)


WINDOWED = ["gemma3, window", "qwen2, window", "gpt2"]


@pytest.mark.parametrize("architecture", WINDOWED)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), trees), st.integers(0, 8), st.integers(1, 30)),
        min_size=2,
        max_size=3,
    )
)
def test_rows_with_trees_of_their_own(architecture: str, rows: list[Any]) -> None:
    """In one batch, trees and chains: each row as it would be alone, and after the commit too."""
    model = build(*ATTENTION[architecture])
    refuse_ragged(model)
    ragged = RaggedModel(model, len(rows))
    texts, blocks, given_ = [], [], []
    for slot, (parents, _, before) in enumerate(rows):
        ragged.storage.open(slot)
        texts.append([(5 * i + slot) % VOCAB for i in range(before)])
        ragged.prefill(slot, texts[-1])
        parents = parents if parents is not None and is_tree(parents) else None
        given_.append(parents)
        size = 4 if parents is None else len(parents) + 1
        blocks.append([(11 * i + 2 + slot) % VOCAB for i in range(size)])
    forwards = ragged.forward(list(range(len(rows))), blocks, parents=given_)
    for slot, (_, node, before) in enumerate(rows):
        draft = Draft(blocks[slot][1:], parents=given_[slot])
        path = draft.path(node % len(draft.tokens))
        kept = [0, *(i + 1 for i in path)]
        ragged.keep(slot, len(blocks[slot]), kept)
        text = texts[slot] + [blocks[slot][i] for i in kept]
        alone = CachedModel(model).forward(text).logits
        torch.testing.assert_close(
            forwards[slot].logits[kept], alone[before:], atol=1e-4, rtol=1e-3
        )
        [again] = ragged.forward([slot], [[1, 2]])
        expected = CachedModel(model).forward([*text, 1, 2]).logits[-2:]
        torch.testing.assert_close(again.logits, expected, atol=1e-4, rtol=1e-3)


def test_batches_of_trees(llama: Any) -> None:
    answers = [greedy_text(llama, [*PROMPT[i:], 1], 40) for i in range(3)]
    ids = [answer[: -40 or None] for answer in answers]

    class Each(Guesses):
        """Knows the row by its prompt."""

        def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
            [self.answer] = [a for a in answers if a[: len(tokens)] == list(tokens)]
            return super().propose(tokens, n, sampling)

    pool = [Each("a", [], [-1, -1, 0, 1, 3], 4), Each("b", [], [-1, 0, -1, 1], 3), "suffix"]
    metasd = MetaSD(llama, drafters=pool, policy="uniform", reward="bd")
    for mode in ("homogeneous", "heterogeneous"):
        outputs = list(metasd.generate_many(ids, max_new_tokens=30, mode=mode, seed=1))
        for prompt, answer, out in zip(ids, answers, outputs, strict=True):
            assert out.sequences[0].tolist() == answer[: len(prompt) + 30]
            assert any(r.depth and r.accepted == 3 for r in out.trace)


def test_scores_log_probabilities_and_shadows_follow_the_path(llama: Any) -> None:
    answer = greedy_text(llama, PROMPT, 60)
    pool = [
        Guesses("tree", answer, [-1, -1, 0, 1, 1, 3], 3),
        Guesses("other", answer, [-1, 0, 0, 2], 3),
        "suffix",
    ]
    metasd = MetaSD(llama, drafters=pool, policy="uniform", reward="bd", shadow=True)
    out = metasd.generate(
        [PROMPT],
        max_new_tokens=40,
        do_sample=True,
        temperature=0.3,
        seed=4,
        output_logits=True,
        output_scores=True,
        output_logprobs=True,
        return_dict_in_generate=True,
    )
    text = out.sequences[0]
    logits = llama(text[None]).logits[0, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.cat(out.scores), logits / 0.3, atol=1e-3, rtol=1e-3)
    expected = logits.log_softmax(-1).gather(1, text[len(PROMPT) :, None])[:, 0]
    assert out.raw_logprobs[0] == pytest.approx(expected.tolist(), abs=1e-3)
    assert any(r.accepted > 1 and r.depth for r in out.trace)
    assert all(len(r.rewards) == len(metasd.router.arms) for r in out.trace if r.rewards)
    assert sum(r.rewards[0] for r in out.trace) > 0.0


def test_processors_see_the_path_alone(llama: Any) -> None:
    """A penalty falls on the tokens of each node's own text, and on no sibling's."""
    draft = Draft([1, 2, 3, 4], parents=[-1, -1, 0, 2])
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    scores = Sampling(penalty).scores(torch.ones(5, VOCAB), [7, 8], draft.before)
    fallen = [set(row.nonzero()[:, 0].tolist()) for row in scores < 1.0]
    assert fallen == [{7, 8}, {7, 8, 1}, {7, 8, 2}, {7, 8, 1, 3}, {7, 8, 1, 3, 4}]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, -1], "3 tokens and 2 parents"),
        ([-1, 1, 0], "node 1 of the draft tree has parent 1"),
        ([-1, -2, 0], "node 1 of the draft tree has parent -2"),
        ([-1, 0, 0.5], "integer"),
    ],
)
def test_what_is_no_tree_is_refused(parents: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_draft(Draft([1, 2, 3], parents=parents), 5, VOCAB, False)


def test_a_tree_deeper_than_asked_for_is_refused() -> None:
    wide = Draft([1, 2, 3, 4], parents=[-1, -1, -1, 0])
    check_draft(wide, 2, VOCAB, False)
    with pytest.raises(ValueError, match="2 tokens deep is the draft tree where 1 were asked for"):
        check_draft(wide, 1, VOCAB, False)


def test_a_chain_may_tell_its_parents() -> None:
    assert Draft([1, 2, 3], parents=[-1, 0, 1]).parents is None
    assert Draft([1, 2, 3], parents=[-1, 0, 0]).depth == 2


# -- The EAGLE head over trees ---------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_llama: Any) -> Any:
    return tiny_llama(5, vocab=48, layers=3, context=160, sharpness=10.0)


SHAPES = [StaticTree(), DynamicTree(), DynamicTree(7, 2), DynamicTree(1), DynamicTree(40, 9)]


def new_tree(model: Any, tree: TreeShape, seed: int = 0) -> EagleTree:
    shape = EagleShape.of(model.config, LAYERS)
    target = Target(model)
    return EagleTree(tree, shape, random_weights(shape, seed), VOCABULARY, target, "eagle")


def chain_like(model: Any, seed: int = 0) -> Eagle:
    shape = EagleShape.of(model.config, LAYERS)
    return Eagle(shape, random_weights(shape, seed), VOCABULARY, Target(model))


@pytest.mark.parametrize("tree", SHAPES, ids=repr)
@pytest.mark.parametrize("n", [1, 3, 6])
def test_eagles_greedy_output_is_the_targets(model: Any, tree: TreeShape, n: int) -> None:
    ids = torch.randint(0, 48, (1, 9), generator=torch.Generator().manual_seed(n))
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    metasd = MetaSD(model, drafters=[new_tree(model, tree), "suffix"], draft_length=n, reward="bd")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        out = metasd.generate(ids, max_new_tokens=40, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert max(r.positions for r in out.trace) <= n


@pytest.mark.parametrize("tree", SHAPES, ids=repr)
@pytest.mark.parametrize("processed", [False, True])
def test_each_node_is_what_a_chain_would_draft_there(
    model: Any, tree: TreeShape, processed: bool
) -> None:
    """Batched steps and the mask in the head change nothing: children of a node are the likeliest
    tokens of a chain head that was led along the node's path."""
    from transformers import RepetitionPenaltyLogitsProcessor

    text = list(range(3, 17))
    features = features_of(model, text)[:-1]
    sampling = Sampling([RepetitionPenaltyLogitsProcessor(1.5)] if processed else None)  # type: ignore[arg-type]
    drafter = new_tree(model, tree)
    drafter.start(text)
    drafter.commit(text, features)
    draft = drafter.propose(text, 4, sampling)

    class Led(Sampling):
        """Chooses what it is told, and notes what the head would have said."""

        def __init__(self, processors: Any, path: list[int]) -> None:
            super().__init__(processors)
            self.path, self.rows = path, list[torch.Tensor]()

        def propose(self, logits: Any, tokens: Any) -> Any:
            _, probs = super().propose(logits, tokens)
            self.rows.append(probs)
            token = [*self.path, 0][len(self.rows) - 1]
            return token, probs

    for node in [-1, *range(len(draft.tokens))]:
        children = [draft.tokens[i] for i in draft.children([node])]
        path = draft.before(node + 1)
        if not children:
            continue
        chain = chain_like(model)
        chain.start(text)
        chain.commit(text, features)
        led = Led(sampling.processors, path)
        chain.propose(text, len(path) + 1, led)
        best = led.rows[-1].topk(len(children)).indices.tolist()
        assert sorted(children) == sorted(best)


def test_static_shape() -> None:
    """EAGLE's 25 nodes: 4, 8, 8, 3 and 2 of depths 1 to 5."""
    counts = StaticTree().counts
    by_depth = [sum(k for ranks, k in counts.items() if len(ranks) == d) for d in range(5)]
    assert by_depth == [4, 8, 8, 3, 2]
    for ranks in counts:
        assert not ranks or ranks[-1] < counts[ranks[:-1]]


@pytest.mark.parametrize("nodes", [1, 5, 12, 25, 60])
def test_a_dynamic_tree_keeps_the_surest_nodes(model: Any, nodes: int) -> None:
    text = list(range(3, 17))
    small, whole = (new_tree(model, DynamicTree(m, 4)) for m in (nodes, 10**6))
    drafts = []
    for drafter in (small, whole):
        drafter.start(text)
        drafter.commit(text, features_of(model, text)[:-1])
        drafts.append(drafter.propose(text, 4, Sampling()))
    few, all_ = drafts
    assert len(few.tokens) == min(nodes, len(all_.tokens)) <= 4 + 3 * 16
    paths = {tuple(all_.before(i + 1)) for i in range(len(all_.tokens))}
    assert {tuple(few.before(i + 1)) for i in range(len(few.tokens))} <= paths
    assert all_.depth == 4


@pytest.mark.parametrize("tree", [StaticTree(), DynamicTree(9, 3)], ids=repr)
def test_sampled_trees_tell_what_they_were_drawn_from(model: Any, tree: TreeShape) -> None:
    text = list(range(3, 17))
    drafter = new_tree(model, tree)
    drafter.start(text)
    drafter.commit(text, features_of(model, text)[:-1])
    sampling = Sampling(do_sample=True, seed=3)
    sampling.begin_block(len(text))
    draft = drafter.propose(text, 4, sampling)
    check_draft(draft, 4, 48, True)
    if not tree.drawn:
        assert draft.probs is None
        return
    assert draft.probs is not None
    assert [token for token, *_ in sampling.drawn] == draft.tokens
    assert [parent for *_, parent in sampling.drawn] == list(draft.lineage)
    for node in [-1, *range(len(draft.tokens))]:
        children = draft.children([node])
        assert len({draft.tokens[i] for i in children}) == len(children)
        for earlier, later in itertools.pairwise(children):
            rest = draft.probs[earlier].clone()
            rest[draft.tokens[earlier]] = 0
            torch.testing.assert_close(draft.probs[later], rest / rest.sum())


def test_a_threshold_keeps_what_is_unsure_from_growing(model: Any) -> None:
    text = list(range(3, 17))
    for tree in (StaticTree(), DynamicTree(60)):
        drafter = new_tree(model, tree)
        for threshold, depth in ((0.0, 4), (0.999, 1)):
            drafter.start(text)
            drafter.commit(text, features_of(model, text)[:-1])
            draft = drafter.propose(text, 4, Sampling(draft_threshold=threshold))
            assert draft.depth == depth


def test_trees_by_name() -> None:
    assert make_tree("static") == StaticTree()
    assert make_tree("dynamic", 12) == DynamicTree(12)
    for kind, nodes, message in [
        ("dynamik", None, "dynamic"),
        ("static", 12, "the static tree has 25"),
        ("dynamic", 0, "nodes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make_tree(kind, nodes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pool:none?tree=bushy", "tree"),
        ("pool:none?nodes=12", "add tree=dynamic"),
        ("pool:none?tree=dynamic&nodes=many", "whole number"),
        ("pool:none?trees=static", "option of a pool"),
    ],
)
def test_a_pools_options_are_checked(model: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pool([name], Target(model))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("tree", ["tree=static", "tree=dynamic&nodes=12"])
def test_the_ready_pool_drafts_trees_losslessly(smollm: Any, tree: str) -> None:
    from metasd_runtime.training.prompts import encode

    ids = torch.tensor([encode(smollm.tokenizer, "Write a python function that adds two numbers.")])
    plain = smollm.model.generate(ids, max_new_tokens=48, do_sample=False)
    chain, trees = (
        MetaSD(smollm.model, smollm.tokenizer, drafters=[pool], reward="bd").generate(
            ids, max_new_tokens=48, policy="fixed", return_dict_in_generate=True
        )
        for pool in ("pool:smollm2-135m", f"pool:smollm2-135m?{tree}")
    )
    assert torch.equal(chain.sequences, plain)
    assert torch.equal(trees.sequences, plain)
    assert trees.statistics.rounds < chain.statistics.rounds
