"""Estimators: identities that hold exactly, intervals that cover, logs that are refused."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from scipy.special import expit, logit

from metasd_bandits import ConfigError, Trace, make_policy
from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay.coverage import interval_coverage
from metasd_bandits.replay.estimators import ESTIMATORS, estimate
from metasd_bandits.replay.full import decisions, full_replay
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.theory import acceptance
from metasd_bandits.traces.columns import ColumnReader, concatenated
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader
from tests.bandits.test_replay import simple_trace

LAW = SyntheticLog(queries=40, rounds=25, logger=(0.5, 0.3, 0.2), seed=3, full=False)
TARGET = (0.1, 0.3, 0.6)
TIMED = dataclasses.replace(LAW, steps=(1.05, 1.2, 1.6))


def in_memory(law):
    reader = SyntheticReader(law)
    fields = ("arm", "reward", "propensity", "emitted", "step")
    return ColumnReader(law.header, concatenated(reader.batches(fields)), reader.query_names)


def shifted(reader, add):
    batch = concatenated(reader.batches(("arm", "reward", "propensity", "emitted", "step")))
    batch.columns["reward"] = 0.5 * batch["reward"] + add
    return ColumnReader(reader.header, batch, reader.query_names)


def of(results, method, quantity="reward per round"):
    return next(e for e in results if (e.method, e.quantity) == (method, quantity))


def test_values_are_the_formulas():
    log = in_memory(LAW)
    batch = next(log.batches(()))
    arm, x, p = batch["arm"], batch["reward"], batch["propensity"]
    w = np.array(TARGET)[arm] / p
    means = np.array([x[arm == a].mean() for a in range(3)])
    results = estimate(log, TARGET, clip=2.0)
    assert of(results, "ips").value == pytest.approx((w * x).mean(), rel=1e-12)
    assert of(results, "snips").value == pytest.approx((w * x).sum() / w.sum(), rel=1e-12)
    clipped = (np.minimum(w, 2.0) * x).mean()
    assert of(results, "clipped-ips").value == pytest.approx(clipped, rel=1e-12)
    dr = np.dot(TARGET, means) + (w * (x - means[arm])).mean()
    assert of(results, "dr").value == pytest.approx(dr, rel=1e-12)
    one = of(results, "ips")
    assert one.effective == pytest.approx(w.sum() ** 2 / (w**2).sum(), rel=1e-12)
    assert one.largest_weight == pytest.approx(w.max(), rel=1e-12)
    assert (one.rounds, one.accepted, one.unit, one.n_units) == (1000, 1000, "query", 40)


def test_snips_moves_with_the_reward_and_ips_does_not():
    before, after = (estimate(shifted(in_memory(LAW), add), TARGET) for add in (0.0, 0.1))
    for end in ("value", "low", "high"):
        gap = getattr(of(after, "snips"), end) - getattr(of(before, "snips"), end)
        assert gap == pytest.approx(0.1, abs=1e-9)
    assert abs(of(after, "ips").value - of(before, "ips").value - 0.1) > 1e-3


def test_doubly_robust_without_residuals_is_the_model():
    model = np.array([0.2, 0.5, 0.9])
    batch = next(in_memory(LAW).batches(()))
    batch.columns["reward"] = model[batch["arm"]]
    log = ColumnReader(LAW.header, batch)
    dr = of(estimate(log, TARGET, model=lambda batch: model), "dr")
    assert dr.value == pytest.approx(model @ TARGET, rel=1e-12)
    assert dr.low == pytest.approx(dr.high, rel=1e-9)
    wrong = of(estimate(log, TARGET, model=lambda batch: np.zeros(3)), "dr")
    assert wrong.value == pytest.approx(of(estimate(log, TARGET), "ips").value, rel=1e-12)


def test_the_logger_itself_is_its_plain_mean():
    log = in_memory(LAW)
    mean = next(log.batches(()))["reward"].mean()
    for e in estimate(log, LAW.logger):
        if e.quantity == "reward per round" and e.method != "dr":  # dr also mends the arms' shares
            assert e.value == pytest.approx(mean, rel=1e-12)
            assert e.largest_weight == pytest.approx(1.0)
            assert e.effective == pytest.approx(1000)


def test_clipping_beyond_the_largest_weight_is_ips_and_below_it_widens():
    log = in_memory(LAW)
    results = estimate(log, TARGET, clip=100.0)
    assert of(results, "clipped-ips").value == of(results, "ips").value
    assert of(results, "clipped-ips").high == of(results, "ips").high
    clipped = of(estimate(log, TARGET, clip=1.0), "clipped-ips")
    assert clipped.value < of(results, "ips").value < clipped.high
    assert "cut" in clipped.notes[0]


def test_clipping_leaves_room_in_tokens_and_in_steps():
    """Unclipped means lie within what was cut times the largest outcome; so must their ratios."""
    log = in_memory(TIMED)
    batch = next(log.batches(()))
    w = np.array(TARGET)[batch["arm"]] / batch["propensity"]
    lost = np.maximum(w - 1.0, 0.0).mean()
    y, t = ((np.minimum(w, 1.0) * batch[name]).mean() for name in ("emitted", "step"))
    results = estimate(log, TARGET, clip=1.0, tokens=64)
    speed = of(results, "clipped-ips", "tokens per step")
    assert speed.low < y / (t + lost * 1.6) < (y + lost * 6) / t < speed.high
    steps = of(results, "clipped-ips", "steps to 64 tokens")
    assert steps.low < steps.value * y / (y + lost * 6) < steps.value * (1 + lost * 1.6 / t)
    assert steps.value * (1 + lost * 1.6 / t) < steps.high
    assert speed.low < of(results, "ips", "tokens per step").value < speed.high


def renewal(pmf, B):
    """Exact expected rounds to B tokens, rounds independent: m(b) = 1 + sum p(y) m(b - y)."""
    m = np.zeros(B + 1)
    for b in range(1, B + 1):
        m[b] = 1.0 + sum(p * m[b - y] for y, p in enumerate(pmf, start=1) if y < b)
    return m[B]


def test_rounds_to_B_tokens_agree_with_the_exact_recursion():
    log = in_memory(dataclasses.replace(LAW, logger=(0.0, 0.4, 0.6), queries=200))
    batch = next(log.batches(()))
    kept = batch["emitted"][batch["arm"] == 2]
    pmf = np.bincount(kept, minlength=7)[1:] / len(kept)
    got = of(estimate(log, "drafter-2", tokens=64), "snips", "rounds to 64 tokens")
    assert got.value == pytest.approx(renewal(pmf, 64), rel=1e-9)


def test_steps_to_B_tokens_agree_with_the_exact_recursion():
    """s(b) = sum_a pi_a (c_a + sum_y p_a(y) s(b - y)): no product of two means in it."""
    log = in_memory(dataclasses.replace(TIMED, queries=200))
    batch = next(log.batches(()))
    w = np.array(TARGET)[batch["arm"]] / batch["propensity"]
    w /= w.sum()
    cost, pmf = w @ batch["step"], np.bincount(batch["emitted"], w)
    s = np.zeros(65)
    for b in range(1, 65):
        s[b] = cost + sum(p * s[b - y] for y, p in enumerate(pmf) if 0 < y < b)
    results = estimate(log, TARGET, tokens=64)
    assert of(results, "snips", "steps to 64 tokens").value == pytest.approx(s[64], rel=1e-9)


def test_tokens_per_step_is_a_ratio_of_estimates_in_closed_form():
    log = in_memory(TIMED)
    batch = next(log.batches(()))
    arm, y, t = batch["arm"], batch["emitted"], batch["step"]
    w = np.array(TARGET)[arm] / batch["propensity"]
    results = estimate(log, TARGET, clip=2.0)

    def dr(x):
        means = np.array([x[arm == a].mean() for a in range(3)])
        return np.dot(TARGET, means) + (w * (x - means[arm])).mean()

    cut = np.minimum(w, 2.0)
    wanted = {"ips": (w @ y) / (w @ t), "clipped-ips": (cut @ y) / (cut @ t), "dr": dr(y) / dr(t)}
    wanted["snips"] = wanted["ips"]
    for method, value in wanted.items():
        e = of(results, method, "tokens per step")
        assert e.value == pytest.approx(value, rel=1e-12)
        assert e.low < e.value < e.high


def test_the_speed_of_few_queries_has_the_textbook_interval_of_a_ratio():
    """Leaving out one query at a time, by hand, and Student's quantile."""
    log = in_memory(dataclasses.replace(TIMED, queries=6))
    batch = next(log.batches(()))
    w = np.array(TARGET)[batch["arm"]] / batch["propensity"]
    y, t = (np.bincount(batch.query, w * batch[name]) for name in ("emitted", "step"))
    left_out = [(y.sum() - y[i]) / (t.sum() - t[i]) for i in range(6)]
    half = scipy.stats.t.ppf(0.975, 5) * math.sqrt(
        5 / 6 * np.sum((left_out - np.mean(left_out)) ** 2)
    )
    e = of(estimate(log, TARGET), "snips", "tokens per step")
    assert (e.value - e.low, e.high - e.value) == pytest.approx((half, half), rel=1e-9)


def test_untimed_rounds_tell_no_speed_and_a_note_says_so():
    batch = next(in_memory(TIMED).batches(()))
    batch.columns["step"] = np.where(np.arange(len(batch)) == 7, math.nan, batch["step"])
    results = estimate(ColumnReader(LAW.header, batch), TARGET, methods=["dr"], tokens=64)
    names = [e.quantity for e in results]
    assert names == ["reward per round", "tokens per round", "rounds to 64 tokens"]
    assert "step is missing" in of(results, "dr", "tokens per round").notes[0]


@pytest.mark.parametrize("queries", [5, 20])
def test_intervals_of_the_speed_cover_the_truth(queries):
    """200 logs of queries whose difficulty differs: hits are binomial(200, at least 0.95)."""
    law = dataclasses.replace(TIMED, queries=queries, spread=0.8)
    truth = true_means(law)["tokens per step"]
    hits = dict.fromkeys(ESTIMATORS, 0)
    for seed in range(200):
        log = in_memory(dataclasses.replace(law, seed=seed))
        for e in estimate(log, TARGET, seed=seed):
            if e.quantity == "tokens per step":
                hits[e.method] += e.low <= truth <= e.high
    least, most = scipy.stats.binom.interval(0.999, 200, 0.95)
    assert all(least <= n <= most for n in hits.values()), hits


@pytest.mark.parametrize("queries", [3, 5, 9, 20])
def test_intervals_of_few_queries_cover_the_truth(queries):
    """200 logs of the page's demo law: hits are binomial(200, about 0.95)."""
    law = SyntheticLog(queries=200, rounds=50, spread=0.5)
    covered = interval_coverage(
        SyntheticReader(law), "drafter-2", levels=[0.95], n_logs=200, queries=queries, seed=1
    )
    least, most = scipy.stats.binom.interval(0.999, 200, 0.95)
    assert all(least <= 200 * share[0] <= most for share in covered.values()), covered


def test_targets_in_every_spelling_agree():
    log = in_memory(LAW)
    spellings = [
        "drafter-1",
        "fixed:arm=1",
        make_policy("fixed", arm=1),
        {"drafter-1": 1.0},
        [0, 1, 0],
        lambda batch: [0.0, 1.0, 0.0],
        lambda batch: np.repeat([[0.0], [1.0], [0.0]], len(batch), axis=1),
    ]
    values = {of(estimate(log, target), "snips").value for target in spellings}
    assert len(values) == 1
    assert of(estimate(log, "uniform"), "ips").value == of(estimate(log, [1 / 3] * 3), "ips").value


@pytest.mark.parametrize(
    "target",
    [[0.5, 0.5], [0.5] * 3, [-0.5, 0.5, 1.0], {"drafter-9": 1.0}, "fixd", [math.nan] * 3],
)
def test_impossible_targets_are_refused(target):
    with pytest.raises(ConfigError):
        estimate(in_memory(LAW), target)


@pytest.mark.parametrize(
    ("rounds", "target", "message"),
    [
        ([], "uniform", "no rounds"),
        ([{"propensity": math.nan}], "uniform", "1 rounds lack a propensity"),
        ([{"propensity": 0.0}], "uniform", "propensity of 0.0"),
        ([{}, {}], "b", "'b', which the logger never used"),
        ([{"propensity": 1.0}, {"arm": 1, "propensity": 1.0}], "uniform", "deterministic logger"),
        ([{"reward": math.nan}], "a", "reward of nan"),
        ([{"reward": 1.5}], "a", "reward of 1.5"),
        ([{}, {"arm": 1}], "ucb", "'ucb' learns"),
        ([{"propensity": 0.25}, {"arm": 1, "propensity": 0.25}] * 60, "uniform", "average 2.0"),
    ],
)
def test_logs_that_do_not_support_the_question_are_refused(rounds, target, message):
    with pytest.raises(ReplayError, match=message):
        estimate(simple_trace(rounds), target)


def test_a_certain_logger_tells_of_its_own_arm():
    trace = simple_trace([{"propensity": 1.0, "query": f"q{i}"} for i in range(20)])
    assert of(estimate(trace, "a"), "ips").value == pytest.approx(0.2)


def test_interleaved_queries_are_still_clusters():
    reader = SyntheticReader(LAW)
    rounds = sorted(reader.rounds(), key=lambda r: r.index)
    mixed = estimate(Trace(LAW.header, rounds), TARGET)
    for a, b in zip(mixed, estimate(reader, TARGET), strict=True):
        assert (a.value, a.n_units) == (pytest.approx(b.value), 40)
        assert (a.low, a.high) == (pytest.approx(b.low), pytest.approx(b.high))


def hermite_mean(f, sd):
    """E f(Z), Z normal."""
    x, w = np.polynomial.hermite_e.hermegauss(80)
    return float(w @ f(sd * x) / w.sum())


def true_means(law):
    """Of TARGET, queries of every difficulty together."""
    alphas = np.array(law.alphas)

    def accepted(z):
        alpha = expit(logit(alphas)[:, None] + z)
        return np.dot(TARGET, acceptance.mean_accepted(alpha, 5))

    mean = hermite_mean(accepted, law.spread)
    return {
        "reward per round": mean / 5,
        "tokens per round": 1 + mean,
        "tokens per step": (1 + mean) / np.dot(TARGET, law.steps),
    }


def coverage(hits):
    return float(np.mean(hits))


def assert_covers(name, hits):
    assert 0.93 <= coverage(hits) <= 0.97, f"{name}: {coverage(hits):.3f}"


LOGS = 1000


@pytest.mark.slow
def test_intervals_of_the_estimators_cover_the_truth():
    """1,000 logs of 60 queries whose difficulty differs; truth by Gauss-Hermite quadrature."""
    law = dataclasses.replace(TIMED, queries=60, rounds=20, spread=0.8)
    truth = true_means(law)
    hits = {(m, q): [] for m in ESTIMATORS for q in truth}
    for seed in range(LOGS):
        log = in_memory(dataclasses.replace(law, seed=seed))
        for e in estimate(log, TARGET, seed=seed):
            hits[e.method, e.quantity].append(e.low <= truth[e.quantity] <= e.high)
    for key, flags in hits.items():
        assert_covers(key, flags)


@pytest.mark.slow
def test_intervals_of_rounds_and_steps_to_B_tokens_cover_the_truth():
    """1,000 logs without queries (rounds are the units); truth by the renewal recursion."""
    law = dataclasses.replace(TIMED, queries=1, rounds=600)
    pmf = sum(p * acceptance.accepted_pmf(a, 5) for p, a in zip(TARGET, law.alphas, strict=True))
    rounds = renewal(pmf, 100)
    truth = {
        "rounds to 100 tokens": rounds,
        "steps to 100 tokens": rounds * np.dot(TARGET, law.steps),
    }
    hits = {(m, q): [] for m in ESTIMATORS for q in truth}
    for seed in range(LOGS):
        log = in_memory(dataclasses.replace(law, seed=seed))
        for e in estimate(log, TARGET, tokens=100, seed=seed):
            if e.quantity in truth:
                hits[e.method, e.quantity].append(e.low <= truth[e.quantity] <= e.high)
    for key, flags in hits.items():
        assert_covers(key, flags)


@pytest.mark.slow
def test_intervals_of_clipping_that_bites_cover_at_least_as_often():
    law = SyntheticLog(queries=1, rounds=400, logger=(0.6, 0.37, 0.03), full=False)
    truth = np.dot(TARGET, acceptance.mean_accepted(law.alphas, 5)) / 5
    hits = []
    for seed in range(300):
        log = in_memory(dataclasses.replace(law, seed=seed))
        e = of(estimate(log, TARGET, methods=["clipped-ips"], clip=10.0), "clipped-ips")
        hits.append(e.low <= truth <= e.high)
    assert coverage(hits) >= 0.95


@pytest.mark.slow
def test_intervals_of_full_and_rejection_replay_cover_the_truth():
    """1,000 logs of 80 queries, a learning policy reset at each query.

    The truth of rejection replay comes from full replay, cut at the binomial number of rounds
    that a uniform logger of three arms lets through.
    """
    law = SyntheticLog(queries=80, rounds=30)
    big = dataclasses.replace(law, queries=60_000, seed=10**6)
    arms_and_rewards = [
        (arms, b.per_arm["rewards"][arms, np.arange(len(arms))], b.query)
        for b, arms in decisions(SyntheticReader(big), "ucb", seed=7)
    ]
    reward = np.concatenate([r for _, r, _ in arms_and_rewards]).reshape(-1, 30)
    kept = np.random.default_rng(0).binomial(30, 1 / 3, len(reward))
    cut = np.arange(30) < kept[:, None]
    truth = {"full": reward.mean(), "rejection": (reward * cut).sum() / cut.sum()}
    hits = {"full": [], "rejection": []}
    for seed in range(LOGS):
        log = SyntheticReader(dataclasses.replace(law, seed=seed))
        for replay in (full_replay, rejection_replay):
            e = replay(log, "ucb", seeds=[seed])["reward per round"]
            hits[e.method].append(e.low <= truth[e.method] <= e.high)
    assert abs(truth["full"] - truth["rejection"]) > 0.005  # the two questions do differ
    for method, flags in hits.items():
        assert_covers(method, flags)
