"""Medusa, BPD, and both rescored: lossless, drafting as they were trained, begun sensibly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumeration import ByLastReward, CopyDrafter, ModelTarget, decode_law, deviation, own_law
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metasd_bandits.checks import ConfigError
from metasd_runtime.decoding.drafter import DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters import output_head, parallel_heads
from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.output_head import with_prompt
from metasd_runtime.drafters.parallel_heads import ParallelHeads, ParallelShape
from metasd_runtime.drafters.rescored import Rescored, best_path
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target
from metasd_runtime.training.corpus import Batch, batches, draft_vocabulary
from metasd_runtime.training.evaluate import evaluate
from metasd_runtime.training.learn import Learning, learn
from metasd_runtime.training.parallel_model import ParallelModel, initial_parallel

VOCAB, HIDDEN, LAYER = 40, 32, 3
VOCABULARY = torch.arange(0, VOCAB, 2)
BLOCKS = ["medusa", "bpd"]


def shape_of(block: str, positions: int = 4, layer: int = LAYER) -> ParallelShape:
    return ParallelShape(block, layer, HIDDEN, positions)


def random_weights(shape: ParallelShape, seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=draws) * 0.2 for name, size in shape.sizes().items()}


def new_heads(block: str, target: Target, seed: int = 0, **options: int) -> ParallelHeads:
    shape = shape_of(block, **options)
    vocabulary = VOCABULARY[target.vocab_size > VOCABULARY]
    return ParallelHeads(shape, random_weights(shape, seed), vocabulary, target, block)


def new_rescored(block: str, target: Target, **options: int) -> Rescored:
    texts = [[i % target.vocab_size for i in range(9)]]
    return Rescored(new_heads(block, target, **options), NGram.of(target.vocab_size, texts))


@pytest.fixture(scope="module")
def model(world: Any) -> Any:
    return world[0]


def features_of(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[LAYER][0]


# -- The drafters ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 6])
def test_greedy_output_is_the_targets(model: Any, n: int) -> None:
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(n))
    plain = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    target = Target(model)
    pool = [new(block, target) for new in (new_heads, new_rescored) for block in BLOCKS]
    assert [drafter.name for drafter in pool] == ["medusa", "bpd", "r-medusa", "r-bpd"]
    metasd = MetaSD(model, drafters=pool, draft_length=n, reward="bd", policy="uniform")
    output = metasd.generate(ids[:1], max_new_tokens=40, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain[:1])
    assert all(arm.pulls > 0 for arm in output.statistics.arms[:4])
    assert max(r.drafted for r in output.trace) == min(n, 4)
    assert torch.equal(metasd.generate(ids, max_new_tokens=40, pad_token_id=0), plain)
    short = model.generate(ids[:, :1], max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(metasd.generate(ids[:, :1], max_new_tokens=9, pad_token_id=0), short)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("new", [new_heads, new_rescored])
def test_its_law_is_the_targets(tiny_llama: Callable[..., Any], block: str, new: Any) -> None:
    """Summed over every draft and coin of whole decodes; the policy looks at the divergence."""
    target = ModelTarget(tiny_llama(4, vocab=3, layers=2, sharpness=6.0))
    other = "bpd" if block == "medusa" else "medusa"
    pool = [
        new(block, target, positions=2, layer=2),
        CopyDrafter("count", lambda text: (text[-1] + 1) % 3),
        new_heads(other, target, positions=2, layer=2),
    ]
    law = decode_law(target, pool, [0, 2], 3, policy=ByLastReward(0.3), draft_length=2)
    assert len(law) == 3**3
    assert deviation(law, own_law(target, [0, 2], 3)) < 1e-6


@settings(max_examples=20, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=6))
@pytest.mark.parametrize("new", [new_heads, new_rescored])
def test_its_state_is_that_of_a_fresh_one(
    model: Any, new: Any, rounds: list[tuple[int, bool]]
) -> None:
    target = Target(model)
    text = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    features = features_of(model, text)
    drafter, length = new("medusa", target), 12
    drafter.start(text[:length])
    drafter.commit(text[:length], features[: length - 1])
    for emitted, chosen in rounds:
        if chosen:
            drafter.propose(text[:length], 4, Sampling())
        drafter.commit(text[: length + emitted], features[length - 1 : length + emitted - 1])
        length += emitted
    fresh = new("medusa", target)
    fresh.start(text[:12])
    fresh.commit(text[:length], features[: length - 1])
    draft, expected = (d.propose(text[:length], 4, Sampling()) for d in (drafter, fresh))
    assert draft.tokens == expected.tokens
    assert draft.owed == expected.owed == 0
    if draft.probs is not None:
        assert torch.equal(draft.probs, expected.probs)


@pytest.mark.parametrize("new", [new_heads, new_rescored])
def test_it_declines_without_hidden_states(model: Any, new: Any) -> None:
    drafter = new("bpd", Target(model))
    drafter.start([1, 2, 3])
    drafter.commit([1, 2, 3], features_of(model, [1, 2]))
    assert set(drafter.propose([1, 2, 3], 4, Sampling()).tokens) <= {*VOCABULARY.tolist(), 1, 3}
    drafter.commit([1, 2, 3, 4])
    with pytest.raises(DrafterUnavailableError, match="of 2 tokens and needs those of 3"):
        drafter.propose([1, 2, 3, 4], 3, Sampling())


def test_bad_parameters_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"heads\.positions=0"):
        shape_of("medusa", 0)
    with pytest.raises(ConfigError, match="did you mean 'medusa'"):
        shape_of("medsa")
    heads, ngram = new_heads("bpd", Target(model)), NGram(VOCAB)
    for bad in ({"candidates": 0}, {"weight": -1.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
            Rescored(heads, ngram, **bad)


# -- The n-gram model and the path ---------------------------------------------------------------

texts = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=3)


def witten_bell(documents: list[list[int]], context: tuple[int, ...], token: int) -> float:
    """The recursion of the docstring, counted by brute force over five tokens."""
    followers = [
        document[end]
        for document in documents
        for end in range(len(context), len(document))
        if tuple(document[end - len(context) : end]) == context
    ]
    shorter = witten_bell(documents, context[1:], token) if context else 1 / 5
    kinds = len(set(followers))
    if not followers:
        return shorter
    return (followers.count(token) + kinds * shorter) / (len(followers) + kinds)


@given(texts, st.lists(st.integers(0, 4), max_size=4), st.integers(1, 3))
def test_ngram_probabilities_are_the_recursions(
    documents: list[list[int]], context: list[int], order: int
) -> None:
    model = NGram(5, order)
    for document in documents:
        model.extend(document, 0)
    probs = [math.exp(x) for x in model.log_probs(context, range(5))]
    assert math.isclose(sum(probs), 1.0)
    seen = tuple(context[max(0, len(context) - order + 1) :])
    assert probs == pytest.approx([witten_bell(documents, seen, token) for token in range(5)])


@given(texts, texts)
def test_what_a_text_teaches_stays_with_it(known: list[list[int]], shown: list[list[int]]) -> None:
    """A model on a base is one of both texts; its base has learned nothing."""
    base, whole = NGram.of(5, known), NGram.of(5, [*known, *shown])
    grown = NGram(5, 3, base)
    for document in shown:
        for end in range(len(document)):  # token by token, as a decode goes
            grown.extend(document[: end + 1], end)
    untouched = NGram.of(5, known)
    for context in ([], [1], [2, 1], [0, 0]):
        assert grown.log_probs(context, range(5)) == whole.log_probs(context, range(5))
        assert base.log_probs(context, range(5)) == untouched.log_probs(context, range(5))


@given(texts, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_the_path_is_the_best_of_all(
    documents: list[list[int]], order: int, n: int, k: int, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    log_q = torch.rand(n, k, generator=draws, dtype=torch.float64).log()
    tokens = torch.stack([torch.randperm(5, generator=draws)[:k] for _ in range(n)])
    model = NGram(5, order)
    for document in documents:
        model.extend(document, 0)

    def value(choice: tuple[int, ...]) -> float:
        total, text = 0.0, [2, 1]
        for j, i in enumerate(choice):
            token = int(tokens[j, i])
            total += float(log_q[j, i]) + 0.7 * model.log_probs(text, [token])[0]
            text.append(token)
        return total

    best = max(value(choice) for choice in itertools.product(range(k), repeat=n))
    path = best_path(log_q, tokens, model, [2, 1], 0.7)
    assert len(path) == n
    at = tuple(tokens[j].tolist().index(token) for j, token in enumerate(path))
    assert value(at) == pytest.approx(best)


# -- Training -------------------------------------------------------------------------------------


def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rounding to eight bits."""
    for module in (parallel_heads, output_head):
        monkeypatch.setattr(module, "quantise", lambda w: (w.float(), torch.ones(w.shape[0])))


@pytest.mark.parametrize("block", BLOCKS)
def test_training_sees_what_drafting_sees(
    world: Any, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position the model in training has the logits that the drafter has."""
    model, _, corpus = world
    exactly(monkeypatch)
    shape = shape_of(block)
    student = ParallelModel(shape, random_weights(shape, 1))
    text = corpus.train[1]
    prompt = len(text.tokens) - text.answered
    drafter = ParallelHeads(shape, student.weights(), VOCABULARY, Target(model))
    features = features_of(model, text.tokens)
    batch = Batch.of([corpus.train[0], text], HIDDEN, torch.device("cpu"))
    tokens = with_prompt(VOCABULARY, text.tokens[:prompt])
    with torch.no_grad():
        unrolled = [
            (student.logits(out, model.lm_head.weight[tokens]), rows.tolist())
            for out, rows in student(batch, 9)
        ]
    assert len(unrolled) == 4
    first = corpus.train[0].answered
    for begin in range(prompt, len(text.tokens)):
        drafter.start(text.tokens[:prompt])
        drafter.commit(text.tokens[:begin], features[: begin - 1])
        logits = drafter.logits(text.tokens[:begin])
        for depth in range(min(4, len(text.tokens) - begin)):
            trained, rows = unrolled[depth]
            row = rows.index(first + begin - prompt + depth)
            assert torch.allclose(trained[row], logits[depth], atol=2e-3)


@pytest.mark.parametrize("rescored", [False, True])
def test_evaluation_counts_the_rounds_of_decoding(
    world: Any, rescored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, corpus = world
    exactly(monkeypatch)
    shape = shape_of("bpd", 5)
    weights = initial_parallel(shape, corpus.train)
    target, rounds = Target(model), 0
    drafter: Any = ParallelHeads(shape, weights, VOCABULARY, target)
    ngram = NGram.of(VOCAB, [text.tokens[-text.answered :] for text in corpus.train])
    if rescored:
        drafter = Rescored(drafter, ngram)
    metasd = MetaSD(model, drafters=[drafter], draft_length=5, policy="fixed", reward="bd")
    for text in corpus.held_out:
        output = metasd.generate(
            [text.tokens[: -text.answered]],
            max_new_tokens=text.answered + 1,  # so that the last block may reach the text's end
            eos_token_id=7,
            return_dict_in_generate=True,
        )
        assert output.new_tokens[: text.answered] == text.tokens[-text.answered :]
        ends = itertools.accumulate(r.emitted for r in output.trace)
        rounds += 1 + sum(end < text.answered for end in ends)
    found = evaluate(
        ParallelModel(shape, weights),
        corpus.held_out,
        model.lm_head.weight,
        VOCABULARY,
        rescorer=ngram if rescored else None,
    )
    emitted = sum(text.answered for text in corpus.held_out)
    assert found.tokens_per_round == pytest.approx(emitted / rounds)
    assert all(0 <= x <= 1 for x in [*found.agreement, *found.divergence])


def test_medusa_begins_as_the_targets_own_head(world: Any) -> None:
    _, _, corpus = world
    shape = shape_of("medusa")
    student = ParallelModel(shape, initial_parallel(shape, corpus.train))
    batch = Batch.of(corpus.train[:1], HIDDEN, torch.device("cpu"))
    A = batch.answer.shape[1]
    for out, rows in student(batch, 4):
        depth = A - len(rows)
        assert torch.equal(out, batch.states[0, -A : batch.states.shape[1] - depth, -HIDDEN:])


def test_bpd_begins_as_the_regression_of_later_states(world: Any) -> None:
    """Each head's map is the closest linear one: what it leaves is orthogonal to its input."""
    _, _, corpus = world
    shape = shape_of("bpd", 2)
    weights = initial_parallel(shape, corpus.train)
    student = ParallelModel(shape, weights)
    noise = ParallelModel(shape, random_weights(shape, 0))
    for distance in (1, 2):
        pairs = [
            (states[:-distance], states[distance:])
            for states in (
                text.states()[0][-text.answered - distance :, -HIDDEN:] for text in corpus.train
            )
        ]
        now, then = (torch.cat(part) for part in zip(*pairs, strict=True))
        with torch.no_grad():
            left, worse = (then - m._outputs(now)[:, distance - 1] for m in (student, noise))
        shrunk = 0.01 * (now.T @ now).diagonal().mean() * (then - left).T @ now
        assert left.square().mean() < then.var()
        assert left.square().mean() < worse.square().mean()
        # Normal equations of ridge regression: now'(then - now R') = lambda R'.
        R = torch.linalg.lstsq(now, then - left).solution
        penalty = 0.01 * (now.T @ now).diagonal().mean()
        assert torch.allclose(now.T @ left, penalty * R, atol=0.05 * float(shrunk.abs().max()))


@pytest.mark.parametrize(("block", "rate"), [("medusa", 3e-3), ("bpd", 1e-3)])
def test_it_learns(world: Any, block: str, rate: float, tmp_path: Any) -> None:
    model, _, corpus = world
    vocabulary = draft_vocabulary(corpus.train, 30, VOCAB)[0]
    shape = shape_of(block)
    student = ParallelModel(shape, random_weights(shape, 0))
    before = evaluate(student, corpus.train, model.lm_head.weight, vocabulary, 4)
    learn(
        student,
        batches([corpus.train], 64, 5),
        model.lm_head.weight[vocabulary],
        Learning(tokens=64 * 60, batch_tokens=64, rate=rate),
        tmp_path / "state.pt",
    )
    after = evaluate(student, corpus.train, model.lm_head.weight, vocabulary, 4)
    assert after.block_divergence > before.block_divergence + 0.1
    assert after.tokens_per_round > before.tokens_per_round
