"""Speculative sampling is exact: the output's law, summed over every draft and every coin.

Nothing is estimated here. The real decoder runs once for each cell of its random numbers
(`enumeration`), and the law that comes out equals the target's own to 1e-12.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from enumeration import (
    ByLastReward,
    CopyDrafter,
    TableDrafter,
    TableTarget,
    continued,
    decode_law,
    deviation,
    every_outcome,
    own_law,
    table,
)
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from metasd_runtime.decoding import sampling, verify
from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.randomness import Purpose
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.verify import Verdict

EXACT = 1e-12


def only(*allowed: int, vocab: int):
    """Logits that put everything on `allowed`, unevenly."""
    return lambda text: [0.3 * t if t in allowed else -math.inf for t in range(vocab)]


@pytest.mark.parametrize("vocab", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("drafts", ["drawn", "copied"])
def test_one_block(vocab, n, drafts):
    """One verified block; what it emits, continued by plain sampling, follows the target."""
    target = TableTarget(table(1, vocab), vocab)
    drafter = TableDrafter("d", table(2, vocab))
    if drafts == "copied":
        drafter = CopyDrafter("d", lambda text: (text[-1] + 1) % vocab)
    law = decode_law(target, [drafter], [0], n + 1, draft_length=n, rounds=1)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert {len(text) for text in law} == set(range(1, n + 2))
    assert deviation(continued(law, target, [0], n + 1), own_law(target, [0], n + 1)) < EXACT


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_whole_decodes_whose_policy_looks_at_the_divergence(seed, threshold):
    """Several rounds; the next drafter depends on tokens drafted behind a rejection."""
    vocab = 2 + seed % 2
    target = TableTarget(table(seed, vocab), vocab)
    pool = [
        TableDrafter("first", table(seed + 10, vocab)),
        TableDrafter("second", table(seed + 20, vocab, scale=3.0)),
        TableDrafter("third", table(seed + 30, vocab, scale=3.0)),
    ]
    tokens = 4 if vocab == 2 else 3
    law = decode_law(target, pool, [0, 1], tokens, policy=ByLastReward(threshold), draft_length=2)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, own_law(target, [0, 1], tokens)) < EXACT


def test_a_pool_of_drawn_and_copied_drafts():
    target = TableTarget(table(5, 3), 3)
    pool = [
        CopyDrafter("copy", lambda text: text[0]),
        TableDrafter("second", table(6, 3)),
        CopyDrafter("count", lambda text: (text[-1] + 1) % 3),
    ]
    law = decode_law(target, pool, [2, 1], 4, policy=ByLastReward(0.35), draft_length=3)
    assert deviation(law, own_law(target, [2, 1], 4)) < EXACT


def test_a_drafter_equal_to_the_target_is_always_believed():
    """p = q: no draft is ever rejected, and the law still holds."""
    logits = table(3, 3)
    accepted = []
    real = verify.speculative

    def watch(*arguments):
        verdict = real(*arguments)
        accepted.append(verdict.accepted == len(arguments[0].tokens))
        return verdict

    target = TableTarget(logits, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "speculative", watch)
        law = decode_law(target, [TableDrafter("same", logits)], [0], 3, draft_length=2)
    assert all(accepted)
    assert deviation(law, own_law(target, [0], 3)) < EXACT


def test_disjoint_support_is_always_rejected():
    target = TableTarget(only(0, 1, vocab=4), 4)
    drafter = TableDrafter("elsewhere", only(2, 3, vocab=4))
    law = decode_law(target, [drafter], [0], 3, draft_length=2)
    assert deviation(law, own_law(target, [0], 3)) < EXACT
    assert not any({2, 3} & set(text) for text in law)


@pytest.mark.parametrize("target_support", [(0,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("drafter_support", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_overlapping_support(target_support, drafter_support):
    target = TableTarget(only(*target_support, vocab=3), 3)
    drafter = TableDrafter("d", only(*drafter_support, vocab=3))
    law = decode_law(target, [drafter], [0], 3, draft_length=2)
    assert deviation(law, own_law(target, [0], 3)) < EXACT


PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.6)],
    "hot": [TemperatureLogitsWarper(1.7)],
    "top-p": [TopPLogitsWarper(0.7)],
    "top-k": [TopKLogitsWarper(2)],
    "min-p": [MinPLogitsWarper(0.3)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
    "temperature, top-p": [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.8)],
    "penalty, temperature, top-k, top-p": [
        RepetitionPenaltyLogitsProcessor(1.4),
        TemperatureLogitsWarper(0.9),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.9),
    ],
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_under_the_users_processors(name):
    """The target's own law is the one after the processors, each at its true prefix."""
    processors = LogitsProcessorList(PROCESSORS[name])
    target = TableTarget(table(8, 4), 4)
    pool = [
        TableDrafter("first", table(9, 4)),
        CopyDrafter("copy", lambda text: text[0]),
        TableDrafter("third", table(8, 4, scale=1.0)),
    ]
    law = decode_law(
        target, pool, [3, 1], 3, policy=ByLastReward(0.4), draft_length=2, processors=processors
    )
    assert deviation(law, own_law(target, [3, 1], 3, processors=processors)) < EXACT


def test_a_processor_that_is_the_targets_alone():
    """The drafter ignores a processor of the user's own; the law is the target's under it."""

    def never_twice(input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = -math.inf
        return scores

    processors = LogitsProcessorList([never_twice, TemperatureLogitsWarper(0.8)])
    target = TableTarget(table(4, 3), 3)
    drafter = TableDrafter("d", table(5, 3))
    law = decode_law(target, [drafter], [0], 3, draft_length=3, processors=processors)
    assert deviation(law, own_law(target, [0], 3, processors=processors)) < EXACT
    assert not any(a == b for text in law for a, b in itertools.pairwise((0, *text)))


def test_texts_that_end_early():
    """An end-of-sequence token in mid-block: the law is plain sampling's with that stop."""
    target = TableTarget(table(11, 3), 3)
    pool = [TableDrafter(str(i), table(12 + i, 3)) for i in range(3)]
    eos = frozenset({2})
    law = decode_law(target, pool, [0], 3, policy=ByLastReward(), draft_length=3, eos=eos)
    assert deviation(law, own_law(target, [0], 3, eos=eos)) < EXACT


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_blocks_that_end_where_the_drafter_doubts(threshold):
    """The block's length depends on what was drafted; the law does not."""
    target = TableTarget(table(31, 3), 3)
    pool = [TableDrafter(str(i), table(32 + i, 3)) for i in range(3)]
    law = decode_law(
        target, pool, [0], 3, policy=ByLastReward(0.5), draft_length=3, draft_threshold=threshold
    )
    assert deviation(law, own_law(target, [0], 3)) < EXACT


@pytest.mark.slow
def test_shadow_drafts_leave_the_law_alone():
    """Every arm drafts, the policy sees every reward, and the output is still the target's."""
    target = TableTarget(table(41, 2), 2)
    pool = [TableDrafter("first", table(42, 2)), TableDrafter("second", table(43, 2, scale=3.0))]
    law = decode_law(target, pool, [0], 3, policy=ByLastReward(0.6), draft_length=2, shadow=True)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, own_law(target, [0], 3)) < EXACT


class Breaks(TableDrafter):
    """A table drafter that raises (or whose logits are NaN) once some token was drafted."""

    def __init__(self, name, logits, on, how):
        super().__init__(name, logits)
        self.on, self.how = on, how

    def propose(self, tokens, n, sampling):
        sound = self.logits

        def breaking(text):
            if len(text) > len(tokens) and text[-1] == self.on:
                if self.how == "raises":
                    raise RuntimeError("broken")
                return [math.nan] * len(sound(text))
            return sound(text)

        self.logits = breaking
        try:
            draft = super().propose(tokens, n, sampling)
        finally:
            self.logits = sound
        if self.how == "returns nonsense" and self.on in draft.tokens:
            draft.probs = draft.probs * math.nan
        return draft


@pytest.mark.filterwarnings("ignore:drafter .* is disabled:RuntimeWarning")
@pytest.mark.parametrize("how", ["raises", "is NaN", "returns nonsense"])
@pytest.mark.parametrize("on", [0, 1, 2])
def test_a_drafter_that_breaks_on_what_it_drew(how, on):
    """What it drew before it broke stands: discarding it would favour the tokens it survives."""
    target = TableTarget(table(14, 3), 3)
    pool = [
        Breaks("first", table(15, 3), on, how),
        Breaks("second", table(16, 3), (on + 1) % 3, how),
        TableDrafter("third", table(17, 3)),
    ]
    law = decode_law(target, pool, [0], 3, policy=ByLastReward(), draft_length=3)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert deviation(law, own_law(target, [0], 3)) < EXACT


# -- The enumeration can fail: each of these is a mistake that somebody made -----------------


def adaptive_deviation() -> float:
    """How far two rounds of an adaptive pool are from the target's law.

    Three drafts, so that the divergence depends on the second of them: when the first is
    rejected, the next block begins where the second stood.
    """
    target = TableTarget(table(11, 2, scale=1.0), 2)
    pool = [
        TableDrafter("first", table(32, 2, scale=3.0)),
        TableDrafter("second", table(53, 2, scale=3.0)),
        TableDrafter("third", table(74, 2, scale=0.5)),
    ]
    law = decode_law(target, pool, [0, 1], 4, policy=ByLastReward(0.7), draft_length=3)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return deviation(law, own_law(target, [0, 1], 4))


def test_draft_numbers_keyed_by_position_alone_bend_the_law(monkeypatch):
    """Which drafter comes next depends on what was drafted behind a rejection; see begin_block."""
    assert adaptive_deviation() < EXACT
    monkeypatch.setattr(Sampling, "begin_block", lambda self, position: None)
    assert adaptive_deviation() > 1e-3


def test_mistakes_in_verification_bend_the_law(monkeypatch):
    def from_p(draft, node, p):
        return p

    def greedy_believed(draft, node, p):
        return float(p[draft.tokens[node]] > 0)

    def not_one_hot(draft, node, p):
        return (p - p.mean()).clamp(min=0)

    for name, mistake in [
        ("residual", from_p),
        ("residual", not_one_hot),
        ("acceptance", greedy_believed),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(verify, name, mistake)
            assert adaptive_deviation() > 1e-3, name


@pytest.mark.filterwarnings("ignore:drafter .* is disabled:RuntimeWarning")
def test_discarding_a_broken_draft_bends_the_law(monkeypatch):
    monkeypatch.setattr("metasd_runtime.decoding.select.drawn_block", lambda sampling, n: Draft())
    target = TableTarget(table(14, 3), 3)
    pool = [Breaks("first", table(15, 3), 0, "raises"), TableDrafter("second", table(16, 3))]
    assert deviation(decode_law(target, pool, [0], 3), own_law(target, [0], 3)) > 1e-3


def test_one_number_for_coin_and_replacement_bends_the_law(monkeypatch):
    def deviates() -> float:
        target = TableTarget(table(1, 3), 3)
        drafter = TableDrafter("d", table(2, 3))
        return deviation(decode_law(target, [drafter], [0], 2), own_law(target, [0], 2))

    def one_for_both(self, position, purpose, sibling=0):
        return sampling.uniform(self.seed, self.row, position, Purpose.SAMPLE)

    assert deviates() < EXACT
    monkeypatch.setattr(Sampling, "uniform", one_for_both)
    assert deviates() > 1e-3


# -- The parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "probs",
    [[1.0], [0.0, 1.0], [1.0, 0.0, 0.0], [0.25, 0.0, 0.5, 0.25], [0.0, 1e-30, 0.0], [3.0, 1.0]],
)
def test_draw_has_the_quantiles_of_its_distribution(probs, dtype):
    """Zero-probability tokens are never drawn, not even at the very ends of [0, 1)."""
    p = torch.tensor(probs, dtype=dtype)
    cumulative = (p.double().cumsum(0) / p.double().sum()).tolist()
    almost_one = 1.0 - 2.0**-53
    for u in [0.0, 2.0**-53, 0.1, 0.3, 0.6, 0.9, almost_one, *cumulative]:
        if u >= 1.0:
            continue
        token = sampling.draw(p, u)
        assert p[token] > 0
        assert cumulative[token] > u or token == max(i for i, x in enumerate(probs) if x)
        assert token == 0 or cumulative[token - 1] <= u


@pytest.mark.parametrize("probs", [[math.nan, 0.5], [0.0, 0.0], [math.inf, 0.0]])
def test_draw_refuses_what_is_no_distribution(probs):
    with pytest.raises(ValueError, match="no distribution"):
        sampling.draw(torch.tensor(probs), 0.5)


def test_only_numbers_up_to_the_rejection_count():
    """What lies behind a rejection is drafted again, so its coins must not have been looked at."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        p = torch.rand(4, 3, generator=generator, dtype=torch.float64)
        q = torch.rand(3, 3, generator=generator, dtype=torch.float64)
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        draft = Draft(torch.randint(3, (3,), generator=generator).tolist(), q)
        looked_at = []

        def number(*key, looked_at=looked_at):
            looked_at.append(key)
            return float(torch.rand(1, generator=generator))

        k = verify.speculative(draft, p.log(), number, number).accepted
        assert looked_at == [*((depth, 0) for depth in range(min(k + 1, 3))), (k,)]


def test_the_enumeration_of_one_coin():
    """The enumerator itself, on a case known by hand: a coin of 1/3, then a die if it fell."""

    def run():
        if sampling.uniform("coin") >= 1 / 3:
            return "none"
        return sampling.draw(torch.tensor([0.5, 0.0, 0.25, 0.25]), sampling.uniform("die"))

    law = every_outcome(run)
    truth = {"none": 2 / 3, 0: 1 / 6, 2: 1 / 12, 3: 1 / 12}
    assert law.keys() == truth.keys()
    assert deviation(law, truth) < 1e-15


def test_a_number_used_twice_is_one_number():
    def run():
        u = sampling.uniform("one")
        return u >= 0.5, sampling.uniform("one") >= 0.25

    assert every_outcome(run) == {
        (True, True): 0.5,
        (False, True): 0.25,
        (False, False): 0.25,
    }


def test_greedy_takes_the_first_maximum():
    scores = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert verify.greedy(Draft([1, 0]), scores) == Verdict([0, 1], 0)
    assert verify.greedy(Draft([2, 0]), scores) == Verdict([], 1)
    assert verify.greedy(Draft([1, 1]), scores) == Verdict([0], 0)
