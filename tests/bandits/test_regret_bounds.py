"""Regret and its bounds against exact enumeration, closed forms, and simulation."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from metasd_bandits import ConfigError, make_policy
from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay import regret as rg
from metasd_bandits.replay.full import full_replay
from metasd_bandits.theory import acceptance, bounds
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader

alpha = st.floats(0.02, 0.98)


def enumerate_policy(alphas, N, B, decide):
    """Exact E[tau], E[n_i], E[S_tau] of a policy whose decision is a function of its history.

    decide(history) -> {arm: probability}; history is a tuple of (arm, accepted).
    """
    pmfs = [acceptance.accepted_pmf(a, N) for a in alphas]
    tau, pulls, total = 0.0, np.zeros(len(alphas)), 0.0
    stack = [((), 1.0, 0)]
    while stack:
        history, p, tokens = stack.pop()
        if tokens >= B:
            tau += p * len(history)
            total += p * tokens
            for arm, _ in history:
                pulls[arm] += p
            continue
        for arm, q in decide(history).items():
            for k, r in enumerate(pmfs[arm]):
                if p * q * r > 0.0:
                    stack.append(((*history, (arm, k)), p * q * r, tokens + k + 1))
    return tau, pulls, total


def ucb_decision(K, N, beta=1.0):
    """MetaSD-UCB written from its formula, ties shared."""

    def decide(history):
        n = np.zeros(K)
        s = np.zeros(K)
        for arm, k in history:
            n[arm] += 1
            s[arm] += k / N
        if (n == 0).any():
            best = np.flatnonzero(n == 0)
        else:
            index = s / n + beta * np.sqrt(2 * math.log(len(history)) / n)
            best = np.flatnonzero(index == index.max())
        return {int(i): 1 / len(best) for i in best}

    return decide


@pytest.mark.parametrize(("alphas", "N", "B"), [((0.8, 0.3), 2, 8), ((0.6, 0.5, 0.1), 1, 7)])
@pytest.mark.parametrize("kind", ["ucb", "uniform"])
def test_the_decomposition_is_exact_and_the_overshoot_less_than_a_round(alphas, N, B, kind):
    K = len(alphas)
    decide = ucb_decision(K, N) if kind == "ucb" else lambda h: dict.fromkeys(range(K), 1 / K)
    tau, pulls, total = enumerate_policy(alphas, N, B, decide)
    best_tau, _, best_total = enumerate_policy(alphas, N, B, lambda h: {0: 1.0})
    g = acceptance.tokens_per_round(np.array(alphas), N)
    lost = pulls @ (1 - g / g.max())
    overshoot = (total - best_total) / g.max()
    assert tau - best_tau == pytest.approx(lost + overshoot, abs=1e-12)
    assert total == pytest.approx(pulls @ g, abs=1e-12)  # Wald
    assert abs(overshoot) <= (g.max() - 1) / g.max() < 1
    assert total - B <= g.max() - 1  # memorylessness


@given(alpha, st.integers(1, 4), st.integers(1, 12))
def test_expected_rounds_agree_with_enumeration(a, N, B):
    exact, _, total = enumerate_policy((a,), N, min(B, 7), lambda h: {0: 1.0})
    assert rg.expected_rounds(acceptance.accepted_pmf(a, N), min(B, 7)) == pytest.approx(exact)
    assert exact * acceptance.tokens_per_round(a, N) == pytest.approx(total)  # Wald


def test_expected_rounds_closed_forms():
    assert rg.expected_rounds([1.0, 0.0], 9) == 9.0
    assert rg.expected_rounds([0.0, 0.0, 1.0], 10) == 4.0
    # one draft: tokens are 1 + Bernoulli(a), so P(tau > r) = P(r + Bin(r, a) < B)
    B, a = 30, 0.6
    survival = sum(binom.cdf(B - 1 - r, r, a) for r in range(B))
    assert rg.expected_rounds([1 - a, a], B) == pytest.approx(survival, rel=1e-12)


def test_regret_of_repeated_runs():
    rng = np.random.default_rng(0)
    best = rng.poisson(50, 400)
    e = rg.stopping_regret(best + rng.poisson(5, 400), best)
    assert e.low < 5 < e.high
    assert (e.unit, e.n_units) == ("run", 400)
    unpaired = rg.stopping_regret(best + rng.poisson(5, 400), 50.0)
    assert unpaired.high - unpaired.low > 2 * (e.high - e.low)
    pulls = np.array([[10, 5], [12, 3]])
    assert rg.pseudo_regret(pulls, [3.0, 1.5]).value == pytest.approx(0.5 * 4)
    slow = rg.time_pseudo_regret(pulls, [3.0, 3.0], [1.0, 2.0])
    assert slow.value == pytest.approx(4 * 2 * 0.5)
    assert rg.time_regret([4.0, 5.0], [3.0, 4.0]).value == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: rg.stopping_regret([1.0], 1.0),
        lambda: rg.stopping_regret([1.0, math.nan], 1.0),
        lambda: rg.stopping_regret([1.0, 2.0], [1.0, 2.0, 3.0]),
        lambda: rg.pseudo_regret([[1, -1]], [1.0, 2.0]),
        lambda: rg.time_pseudo_regret([[1, 1], [1, 1]], [1.0, 2.0], [0.0, 1.0]),
        lambda: rg.expected_rounds([0.5, 0.4], 3),
        lambda: rg.expected_rounds([1.0], 0),
        lambda: bounds.metasd_ucb_upper([], 5, 100),
        lambda: bounds.metasd_ucb_upper([0.5, 1.2], 5, 100),
        lambda: bounds.metasd_ucb_upper([0.5, 0.2], 5, 100, beta=0.8),
        lambda: bounds.metasd_ucb_upper([0.5, 0.2], 5, 0.5),
        lambda: bounds.metasd_ucb_upper([0.5, 0.2], 5, 9, reward="be", independent_positions=True),
        lambda: bounds.metasd_ucb_upper([0.5, 0.2], 5, 9, reward="bds"),
        lambda: bounds.metasd_ucb_pulls([1.5], 10),
        lambda: bounds.ucbspec_upper([0.5, 2.0], 5, 100),
        lambda: bounds.ucbspec_upper([1.5, 2.0], 5, 100, delta=0.0),
        lambda: bounds.exp3spec_upper(1, 5, 100, 50),
        lambda: bounds.exp3spec_upper(3, 5, 100, 10),
        lambda: bounds.lai_robbins([0.5, 1.5]),
        lambda: bounds.exp3_upper(3, 100, gamma=1.5),
        lambda: bounds.lower_bound([0.5], 5, 0.0),
    ],
)
def test_impossible_values_are_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_the_upper_bound_is_the_formula():
    a, N, B = [0.8, 0.5], 5, 1000
    g = acceptance.tokens_per_round(np.array(a), N)
    lost = (g[0] - g[1]) / g[0]
    textbook = lost * (8 * math.log(B) / 0.3**2 + 1 + math.pi**2 / 3) + 1
    assert bounds.metasd_ucb_upper(a, N, B) == pytest.approx(textbook, rel=1e-12)
    narrow = bounds.metasd_ucb_upper(a, N, B, beta=1 / math.sqrt(N), independent_positions=True)
    textbook = lost * (8 * math.log(B) / (N * 0.3**2) + 1 + math.pi**2 / 3) + 1
    assert narrow == pytest.approx(textbook, rel=1e-12)
    gap = (g[0] - g[1]) / N
    textbook = lost * (8 * math.log(B) / gap**2 + 1 + math.pi**2 / 3) + 1
    assert bounds.metasd_ucb_upper(a, N, B, reward="be") == pytest.approx(textbook, rel=1e-12)


@given(st.lists(alpha, min_size=2, max_size=6), st.integers(1, 8), st.integers(20, 10**6))
def test_bounds_are_ordered_and_behave(alphas, N, B):
    for reward in ("bd", "be", "tokens"):
        upper = bounds.metasd_ucb_upper(alphas, N, B, reward=reward)
        assert upper >= bounds.lower_bound(alphas, N, B) - 1e-9
        assert upper >= bounds.metasd_ucb_upper(alphas, N, B // 2, reward=reward)
        assert upper == pytest.approx(
            bounds.metasd_ucb_upper(sorted(alphas), N, B, reward=reward), rel=1e-9
        )
    narrow = bounds.metasd_ucb_upper(
        alphas, N, B, beta=1 / math.sqrt(N), independent_positions=True
    )
    assert narrow <= bounds.metasd_ucb_upper(alphas, N, B) * (1 + 1e-12)


@given(st.lists(alpha, min_size=2, max_size=5), st.floats(2.0, 1e6))
def test_with_one_draft_the_lower_bound_is_lai_robbins(alphas, B):
    """N = 1: a round is a Bernoulli trial, tokens are 1 + reward."""
    expected = bounds.lai_robbins(alphas, B) / (1 + max(alphas))
    assert bounds.lower_bound(alphas, 1, B) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_limits_of_the_lower_bound():
    assert bounds.lower_bound([0.5, 0.5], 5, 100) == 0.0
    assert bounds.lower_bound([1.0, 0.5], 5, 100) == 0.0  # one rejection unmasks the worse arm
    kl = 0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    assert bounds.lai_robbins([0.9, 0.6]) == pytest.approx(0.3 / kl, rel=1e-12)


def test_bounds_from_the_literature():
    """Worked by hand from the printed formulas."""
    first = (1 / 3) * (4 + 2 * 4 * (1 + 2 * math.log(2 * 2 * 100 / 0.5)))
    expected = first + math.pi**2 / 12 + 2
    assert bounds.ucbspec_upper([3.0, 2.0], 2, 10) == pytest.approx(expected, rel=1e-12)
    k = 2 * math.log(2)
    small = 2 * 5 * math.sqrt(100 * k)
    assert bounds.exp3spec_upper(2, 5, 100, 40) == pytest.approx(small, rel=1e-12)
    long = 2 * 5 * (2 * 5 * k + math.sqrt(2e5 * k))
    assert bounds.exp3spec_upper(2, 5, 1e6, 2e5) == pytest.approx(long, rel=1e-12)
    assert bounds.exp3_upper(10, 1000) == pytest.approx(
        2 * math.sqrt(math.e - 1) * math.sqrt(1000 * 10 * math.log(10)), rel=1e-12
    )
    assert bounds.exp3_upper(2, 100, 0.1) == pytest.approx((math.e - 1) * 10 + 20 * math.log(2))


def test_exact_regret_of_ucb_stays_below_the_bound():
    """Enumeration, no Monte Carlo: B = 9 with two arms."""
    alphas, N, B = (0.9, 0.2), 1, 9
    tau, pulls, _ = enumerate_policy(alphas, N, B, ucb_decision(2, N))
    best = rg.expected_rounds(acceptance.accepted_pmf(0.9, N), B)
    assert 0 < tau - best < bounds.metasd_ucb_upper(alphas, N, B, reward="be")
    assert pulls[1] < bounds.metasd_ucb_pulls([0.0, 0.7], B)[1]


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["be", "bd"])
def test_simulated_regret_lies_between_nothing_and_the_bound(reward):
    """500 texts of 100 to 400 tokens; regret per token falls."""
    law = SyntheticLog(alphas=(0.8, 0.5), queries=500, rounds=400, reward=reward, seed=1)
    best = {B: rg.expected_rounds(acceptance.accepted_pmf(0.8, 5), B) for B in (100, 200, 400)}
    regret = {}
    for B in best:
        played = full_replay(SyntheticReader(law), "ucb", tokens=B)[f"rounds to {B} tokens"]
        upper = bounds.metasd_ucb_upper(law.alphas, 5, B, reward=reward)
        assert 0 < played.low - best[B] < played.high - best[B] < upper
        regret[B] = played.value - best[B]
    assert regret[400] / 400 < regret[200] / 200 < regret[100] / 100


def test_regret_from_a_trace_is_the_paired_difference():
    law = SyntheticLog(queries=50, rounds=60, steps=(1.0, 1.0, 5.0), seed=2)
    result = rg.regret_from_trace(SyntheticReader(law), "ucb", 50, seeds=(0, 1))
    ucb = full_replay(SyntheticReader(law), "ucb", tokens=50, seeds=(0, 1))
    rounds, steps = "rounds to 50 tokens", "steps to 50 tokens"
    arms = [full_replay(SyntheticReader(law), f"fixed:arm={i}", tokens=50) for i in range(3)]
    best = min(a[rounds].value for a in arms)
    assert result["rounds"].value == pytest.approx(ucb[rounds].value - best, rel=1e-12)
    assert result["rounds"].low < result["rounds"].value < result["rounds"].high
    fastest = min(a[steps].value for a in arms)
    assert result["steps"].value == pytest.approx(ucb[steps].value - fastest, rel=1e-12)
    assert arms[2][rounds].value == best  # the dear arm needs the fewest rounds ...
    assert arms[2][steps].value > fastest  # ... and not the least time
    zero = rg.regret_from_trace(SyntheticReader(law), "fixed:arm=2", 50)["rounds"]
    assert (zero.value, zero.low, zero.high) == (0.0, 0.0, 0.0)
    untimed = dataclasses.replace(law, full=False)
    with pytest.raises(ReplayError, match="every arm's reward"):
        rg.regret_from_trace(SyntheticReader(untimed), "ucb", 50)
    with pytest.raises(ReplayError, match="so ask for at most"):
        rg.regret_from_trace(SyntheticReader(law), "ucb", 400)


def test_the_reference_policy_is_the_package_s():
    """The enumeration's UCB and the compiled one agree on a run without ties."""
    rng = np.random.default_rng(4)
    policy = make_policy("ucb", beta=1.0)
    policy.reset(2, 0)
    history = ()
    decide = ucb_decision(2, 50)
    for _ in range(200):
        options = decide(history)
        arm = policy.select()
        assert arm in options
        k = int(rng.integers(0, 51))
        policy.update(arm, k / 50)
        history = (*history, (arm, k))
