"""Several drafters' tokens in one block: exact under any choice of nodes, and what is learned."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumeration import (
    TableDrafter,
    TableTarget,
    decode_law,
    deviation,
    own_law,
    table,
)
from scripted import Script, greedy_text
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from metasd_bandits import ConfigError, TraceError, TraceWriter, read_trace
from metasd_bandits.blocks import BlockUCB, Calibrator, replay_blocks
from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.randomness import Purpose
from metasd_runtime.decoding.sampling import Sampling, draw
from metasd_runtime.decoding.verify import drawn_first, verify
from metasd_runtime.drafters.copies import Copies
from metasd_runtime.drafters.evidence import Evidence
from metasd_runtime.drafters.merged import Candidates, Merged
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.suffix import Suffix
from metasd_runtime.drafters.timing import VerifyTimes
from metasd_runtime.explain import as_html, as_text, pieces
from metasd_runtime.metasd import MetaSD, Output

EXACT = 1e-12
PROCESSORS = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TopKLogitsWarper(2)])


class Branching(Drafter):
    """A tree that is a function of the text: siblings, equal tokens, several depths."""

    name = "branching"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        first = (tokens[-1] + 1) % self.vocab
        drafted = [first, (first + 1) % self.vocab, first]
        return Draft(drafted[: 2 + (n > 1)], parents=[-1, -1, 0][: 2 + (n > 1)])


def drafters(kind: str, vocab: int) -> list[Drafter]:
    tables = [TableDrafter("a", table(7, vocab)), TableDrafter("b", table(8, vocab, 3.0))]
    return {
        "head": tables[:1],
        "two heads": tables,
        "lookup and head": [PromptLookup(), tables[0]],
        "suffix and head": [Suffix(), tables[1]],
        "lookup and tree": [PromptLookup(), Branching(vocab)],
        "copies": [PromptLookup(), Suffix()],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["head", "two heads", "lookup and head", "suffix and head", "lookup and tree", "copies"],
)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("processors", [None, PROCESSORS], ids=["plain", "processed"])
def test_the_law_is_the_targets(kind, nodes, processors):
    """Whole decodes, learning from round to round, over every random number that is asked for."""
    vocab, prompt, tokens = 3, [0, 1, 2, 0, 1], 4
    target = TableTarget(table(3, vocab), vocab)
    law = decode_law(
        target,
        [Merged(drafters(kind, vocab))],
        prompt,
        tokens,
        draft_length=nodes,
        processors=processors,
    )
    truth = own_law(target, prompt, tokens, processors=processors or ())
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, truth) < EXACT


def test_tokens_that_were_drawn_may_not_be_chosen_from():
    """The mistake the design avoids: draw, then keep what has a large probability."""

    class KeepsLikely(TableDrafter):
        def propose(self, tokens: Any, n: int, sampling: Sampling) -> Draft:
            draft = super().propose(tokens, n, sampling)
            assert draft.probs is not None
            if float(draft.probs[0, draft.tokens[0]]) < 0.4:
                return Draft()
            return draft

    target = TableTarget(table(3, 3), 3)
    law = decode_law(target, [KeepsLikely("d", table(4, 3))], [0], 2, draft_length=1)
    assert deviation(law, own_law(target, [0], 2)) > 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_under_sampling_the_text_is_plain_decodings(seed):
    """Pathwise: a block of undrawn tokens, whatever they are, leaves each token as it was drawn."""
    chance = random.Random(seed)
    vocab, n = 5, chance.randrange(0, 9)
    parents = [chance.randrange(-1, i) for i in range(n)]
    draft = Draft([chance.randrange(vocab) for _ in range(n)], parents=parents)
    scores = torch.randn(n + 1, vocab, generator=torch.Generator().manual_seed(seed)).double()
    numbers = [chance.random() for _ in range(n + 1)]
    verdict = drawn_first(draft, scores, numbers.__getitem__)
    here, text = [-1], []
    while here:  # plain decoding along the same scores
        text.append(draw(scores[here[0] + 1].softmax(-1), numbers[len(text)]))
        here = [i for i in draft.children(here[:1]) if draft.tokens[i] == text[-1]][:1]
    assert [*(draft.tokens[i] for i in verdict.path), verdict.token] == text


def test_a_copied_draft_asks_for_no_coin(monkeypatch):
    asked = []
    sampling = Sampling(do_sample=True, seed=3)
    monkeypatch.setattr(
        Sampling, "uniform", lambda self, position, purpose, sibling=0: asked.append(purpose) or 0.5
    )
    verify(Draft([1, 2], parents=[-1, -1]), torch.zeros(3, 4), 7, sampling)
    assert set(asked) == {Purpose.SAMPLE}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_greedy_text_is_the_librarys_and_seeded_text_is_plain_decodings(tiny_llama, seed, nodes):
    model = tiny_llama(seed, vocab=12, sharpness=8.0)
    prompt = [random.Random(seed).randrange(12) for _ in range(9)]
    merged = MetaSD(
        model, drafters=["prompt-lookup", "suffix", "early-exit:1", "none"], draft_length=nodes
    )
    plain = MetaSD(model, drafters=["none"])
    assert merged.router.arms[0] == "merged"
    assert merged.generate(prompt, max_new_tokens=40)[0].tolist() == greedy_text(model, prompt, 40)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 30, "seed": seed}
    assert merged.generate(prompt, **settings).equal(plain.generate(prompt, **settings))


@pytest.mark.parametrize("mode", ["homogeneous", "heterogeneous"])
def test_rows_of_a_batch_are_what_they_are_alone(tiny_llama, mode):
    model = tiny_llama(1, vocab=12, sharpness=8.0)
    prompts = [[1, 2, 3, 1, 2], [5, 6, 5, 6, 5, 6], [7, 8]]
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:1"])
    outputs = list(metasd.generate_many(prompts, max_batch=2, mode=mode, max_new_tokens=20))
    assert [o.sequences[0].tolist() for o in outputs] == [
        greedy_text(model, p, 20) for p in prompts
    ]
    assert all(len(round_.nodes or ()) == round_.drafted for o in outputs for round_ in o.trace)
    assert any(round_.nodes for o in outputs for round_ in o.trace)


def test_where_arms_must_stand_apart_a_bandit_chooses(tiny_llama):
    model = tiny_llama(2, vocab=12)
    for options in ({"shadow": True}, {"draft_all": True}, {"draft_length": [2, 4]}):
        metasd = MetaSD(model, drafters=["prompt-lookup", "suffix"], **options)
        assert "merged" not in metasd.router.arms
        assert metasd.router.policy.name == "ucb"
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:1", "none"])
    call = {"max_new_tokens": 8, "return_dict_in_generate": True}

    def arms(**options: Any) -> tuple[str, ...]:
        output = metasd.generate([1, 2, 3], **call, **options)
        assert isinstance(output, Output)
        return output.trace.header.arms

    assert arms() == ("merged", "none")
    assert arms(pool=["prompt-lookup"]) == ("merged", "none")
    assert arms(policy="ucb") == ("prompt-lookup", "early-exit:1", "none")
    assert arms(policy="ucb", pool=["early-exit:1"]) == ("early-exit:1", "none")
    assert arms(shadow=True) == ("prompt-lookup", "early-exit:1", "none")
    assert arms(draft_all=True) == ("prompt-lookup", "early-exit:1", "none")
    assert arms(speculate=False) == ("none",)
    ucb = MetaSD(model, drafters=["prompt-lookup", "early-exit:1"], policy="ucb")
    output = ucb.generate([1, 2, 3], policy="auto", **call)
    assert isinstance(output, Output)
    assert output.trace.header.arms == ("merged", "none")


@pytest.mark.parametrize("wrong", ["auto:beta=1", "auto:router", "auto:router="])
def test_options_of_auto(tiny_llama, wrong):
    with pytest.raises(ConfigError, match=r"auto:router=PATH"):
        MetaSD(tiny_llama(0), drafters=["prompt-lookup"], policy=wrong)


def test_one_node_for_equal_tokens_and_chances_of_siblings_sum_to_one():
    offered = Candidates([0.9, 0.8, 0.5])
    a = offered.add(-1, 7, 0, 0)
    b = offered.add(-1, 9, 2, 1)
    assert offered.add(-1, 7, 2, 2) == a
    assert offered.owners == [[0, 2], [2]]
    assert offered.keys == [[0, 2], [1]]  # both speak, and both learn
    assert offered.reached(a) == 0.5
    offered.add(b, 7, 2, 0)
    stands = offered.stands()
    assert stands[a] + stands[b] == pytest.approx(1.0)
    assert stands[2] == pytest.approx(stands[b] * 0.9)


@pytest.mark.parametrize("seed", range(10))
def test_what_the_text_tells_of_candidates(seed):
    """Each node whose path to its parent is the text's is seen; it stands if it goes on so."""
    chance = random.Random(seed)
    offered = Candidates([0.5])
    for _ in range(12):
        offered.add(chance.randrange(-1, len(offered.tokens)), chance.randrange(3), 0, 0)
    emitted = [chance.randrange(3) for _ in range(4)]

    def text(node: int) -> list[int]:
        parent = offered.parents[node]
        return [*(text(parent) if parent >= 0 else []), offered.tokens[node]]

    expected = {
        i: text(i) == emitted[: len(text(i))]
        for i in range(len(offered.tokens))
        if text(i)[:-1] == emitted[: len(text(i)) - 1] and len(text(i)) <= len(emitted)
    }
    assert dict(offered.seen(emitted)) == expected


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_all_that_followed(seed):
    """Against a search through the text: each child, its places, its share, its longest match."""
    chance = random.Random(seed)
    longest, n = 5, 3
    copies = Copies(recall=True, longest=longest)
    texts = [[chance.randrange(3) for _ in range(chance.randrange(2, 9))] for _ in range(2)]
    copies.start(texts[0])
    copies.start(texts[1][:2])
    copies.commit(texts[1])

    def matched(document: list[int], end: int) -> int:
        pairs = zip(reversed(document[:end]), reversed(texts[1]), strict=False)
        return min(longest, sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)))

    places = [
        (which, end, matched(document, end))
        for which, document in enumerate(texts)
        for end in range(1, len(document))
        if matched(document, end)
    ]
    levels = list(copies.propose(n))
    paths, flat = list[list[int]](), [copy for level in levels for copy in level]
    for copy in flat:
        paths.append([*(paths[copy.parent] if copy.parent >= 0 else []), copy.token])
    for copy, path in zip(flat, paths, strict=True):
        depth = len(path) - 1
        at = [p for p in places if texts[p[0]][p[1] : p[1] + depth] == path[:-1]]
        followed = [p for p in at if texts[p[0]][p[1] : p[1] + depth + 1] == path]
        assert copy.places == len(at)
        assert copy.share == pytest.approx(len(followed) / len(at))
        assert copy.length == max(p[2] for p in followed) + depth
        assert copy.recalled == all(p[0] == 0 for p in followed)
    first = {texts[which][end] for which, end, _ in places}
    assert {copy.token for copy in (levels[0] if levels else [])} == first


def test_a_drafter_that_breaks_leaves_and_decoding_goes_on(tiny_llama):
    class Breaks(Script):
        def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
            raise DrafterUnavailableError("out of context")

    model = tiny_llama(4, vocab=12)
    metasd = MetaSD(model, drafters=[Breaks("breaks", lambda *_: []), PromptLookup()])
    with pytest.warns(RuntimeWarning, match="'breaks' is disabled for this query"):
        text = metasd.generate([1, 2, 1, 2, 1], max_new_tokens=12)
    assert text[0].tolist() == greedy_text(model, [1, 2, 1, 2, 1], 12)


def test_a_drafter_whose_time_is_not_worth_it_is_not_asked():
    """Sure copies leave it nothing to add; without them it is asked, unless it is too dear."""
    asked = []

    def say(tokens: Sequence[int], n: int) -> list[int]:
        asked.append(len(tokens))
        return [9] * n

    merged = Merged([PromptLookup(), Script("head", say)])
    loop = [1, 2, 3, 4] * 10

    def decode(begin: list[int], rounds: int) -> int:
        asked.clear()
        text = list(begin)
        merged.start(text)
        for _ in range(rounds):
            merged.propose(text, 4, Sampling())
            text += loop[len(text) % 4 :][:1]
            merged.commit(text)
        return len(asked)

    merged.learned.round(1, 0.05)
    merged.learned.steps[0].observe(0.01)
    merged.learned.steps[0].n = math.inf  # its step stays at a fifth of a token's time
    merged.learned.steps[0].observe = lambda seconds: None  # type: ignore[method-assign]
    merged.learned.round = lambda tokens, seconds: None  # type: ignore[method-assign]
    assert decode(loop[:40], 8) == 0
    assert decode([5, 6], 1) == 1
    merged.learned.steps[0].mean = 1.0
    assert decode([5, 6], 1) == 0


def test_verifying_times_rise_and_untried_sizes_are_hoped_for():
    times = VerifyTimes()
    assert math.isnan(times(3))
    for size, seconds in ((1, 1.0), (2, 3.0), (4, 2.0), (6, 5.0)):
        times.observe(size, seconds)
    fitted = [times(n) for n in range(9)]
    assert fitted == sorted(fitted)
    assert fitted[2:5] == pytest.approx([2.5] * 3)  # pooled: two nodes cannot take longer than four
    assert fitted[5] == pytest.approx(2.5)  # never tried
    assert fitted[8] == 5.0


def test_evidence_has_a_bin_of_its_own_for_each_kind():
    evidence = Evidence(["a", "b"])
    assert len(set(evidence.names)) == len(evidence.names)
    drafted = {
        evidence.drafted(d, rank, c, relation)
        for d in range(2)
        for rank in range(3)
        for c in (0.01, 0.5, 1.0)
        for relation in range(5)
    }
    copied = {
        evidence.copied(recalled, length, places, share)
        for recalled in (False, True)
        for length in (1, 5, 99)
        for places in (1, 99)
        for share in (0.01, 1.0)
    }
    depths = {evidence.at_depth(d, depth) for d in range(2) for depth in range(12)}
    assert len(drafted) == 90
    assert len(copied) == 24
    assert len(depths) == 24
    assert len(drafted | copied | depths) == 90 + 24 + 24
    assert max(drafted | copied | depths) == len(evidence.names) - 1
    assert all(0.0 <= mean <= 1.0 for mean, _ in evidence.prior.values())


def output_of(tiny_llama: Any, **settings: Any) -> tuple[MetaSD, Output]:
    model = tiny_llama(5, vocab=12, sharpness=8.0)
    metasd = MetaSD(model, drafters=["prompt-lookup", "early-exit:1"])
    output = metasd.generate(
        [1, 2, 3, 1, 2], max_new_tokens=40, return_dict_in_generate=True, **settings
    )
    assert isinstance(output, Output)
    return metasd, output


def test_rounds_tell_of_every_node(tiny_llama, tmp_path):
    _, output = output_of(tiny_llama, trace=tmp_path / "t.jsonl")
    emitted = iter(output.new_tokens)
    for round_ in output.trace:
        nodes, text = round_.nodes or (), [next(emitted) for _ in range(round_.emitted)]
        assert len(nodes) == round_.drafted
        path = [i for i, node in enumerate(nodes) if node.stood]
        assert [nodes[i].token for i in path] == text[: round_.accepted]
        for i, node in enumerate(nodes):
            above = node.parent < 0 or node.parent in path
            assert (node.stood is not None) == above or len(text) == round_.accepted
            assert 0.0 <= node.chance <= 1.0
            assert node.owners
            assert node.parent < i
    read = read_trace(tmp_path / "t.jsonl")
    assert [r.nodes for r in read] == [r.nodes for r in output.trace]
    assert read.header.meta["proposers"] == ["copy", "recall", "early-exit:1"]
    assert any(r.nodes for r in read)


@pytest.mark.parametrize(
    "nodes", ["[[1, 0, [0], 0.5, true]]", "[[1, -1, [0], 1.5, true]]", "[[1, -1]]", "3"]
)
def test_damaged_nodes_are_refused(tiny_llama, tmp_path, nodes):
    _, output = output_of(tiny_llama)
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, output.trace.header) as writer:
        writer.write(next(round_ for round_ in output.trace if round_.nodes))
    head, line = path.read_text().splitlines()
    begin, end = line.index('"nodes":') + 8, line.rindex("}")
    path.write_text(f"{head}\n{line[:begin]}{nodes}{line[end:]}\n")
    with pytest.raises(TraceError, match=r"nodes\[0\]"):
        read_trace(path)


def test_the_explanation_is_the_text(tiny_llama, letters):
    _, output = output_of(tiny_llama)
    told = pieces(output.trace, output.new_tokens, letters(12).decode)
    assert "".join(piece.text for piece in told) == letters(12).decode(output.new_tokens)
    accepted = sum(round_.accepted for round_ in output.trace)
    assert sum(bool(piece.proposers) for piece in told) == accepted > 0
    assert sum(piece.ends_round for piece in told) == len(output.trace)
    page = as_html(told)
    assert page.count("<span style=") == accepted + page.count('title="proposer"')
    assert page.count("<i ") == sum(len(piece.others) for piece in told)
    assert as_text(told).plain.count("|") == len(output.trace)


def test_what_was_learned_can_be_taken_up():
    merged, other = (Merged([PromptLookup(), Script("s", lambda t, n: [1])]) for _ in range(2))
    merged.start([1, 2, 1])
    merged.propose([1, 2, 1], 3, Sampling())
    merged.commit([1, 2, 1, 2])
    other.learned.load_state_dict(merged.learned.state_dict())
    assert other.learned.state_dict() == merged.learned.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.start([1, 2, 1])


def test_recorded_blocks_replay_as_they_were_and_smaller_ones_bring_no_more(tiny_llama, tmp_path):
    metasd = MetaSD(tiny_llama(3, vocab=12), drafters=["prompt-lookup", "suffix", "early-exit:1"])
    path = tmp_path / "trace.jsonl"
    metasd.generate([1, 2, 3, 1, 2, 3, 1], max_new_tokens=40, eos_token_id=None, trace=path)
    rounds = read_trace(path).rounds[:-1]  # the last one was cut at the length
    nodes = [r.nodes or () for r in rounds]

    def replayed(budget: int) -> list[int]:
        return replay_blocks(nodes, BlockUCB(Calibrator("abcdefgh")), budget)

    assert any(len(block) > 1 for block in nodes)
    assert replayed(99) == [r.emitted for r in rounds]
    assert all(a <= b for a, b in zip(replayed(1), replayed(99), strict=True))
    assert replayed(0) == [1] * len(rounds)
