"""Exact expectations: every decision's probability from the policy's own kernels, no sampling."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from metasd_bandits import make_policy
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.compiled.stream import make_stream

sys.path.insert(0, str(Path(__file__).parent))
import engine
import exact

ARMS = np.array([[0.9, 0.6], [0.55, 0.45]])
LAST_DIGIT = 5e-11  # half a unit of the listed values
HORIZONS = np.array([20, 50, 100])


def expected_pulls(name: str, horizons: np.ndarray) -> np.ndarray:
    policy = make_policy(name)
    module = specialise(exact, **policy.kernels())
    pulls, clashes = module.expected_pulls(policy.fresh_buffer(2), horizons, ARMS)
    assert clashes == 0, "two histories with the same counts left different states behind"
    return pulls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "easy", "hard"),
    [
        ("ucb:beta=1", [6.7251541104, 13.7943177672, 22.5749490703], 39.1987183664),
        ("kl-ucb", [3.8725557173, 5.9292353768, 7.9589712424], 31.9194688598),
    ],
)
def test_index_policies_have_the_exact_expected_pulls(name, easy, hard):
    pulls = expected_pulls(name, HORIZONS)
    assert pulls[0] == pytest.approx(easy, abs=LAST_DIGIT)
    assert pulls[1, 2] == pytest.approx(hard, abs=LAST_DIGIT)


@pytest.mark.slow
def test_thompson_has_the_exact_expected_pulls():
    pulls = expected_pulls("thompson", HORIZONS[:1])
    by_recurrence = thompson_by_recurrence(100)
    assert pulls[:, 0] == pytest.approx(by_recurrence[20], abs=1e-11)
    exact_pulls = [by_recurrence[T][0] for T in HORIZONS]
    assert exact_pulls == pytest.approx([5.1380801652, 7.5421576721, 9.0406285725], abs=LAST_DIGIT)
    assert by_recurrence[100][1] == pytest.approx(33.0548012142, abs=LAST_DIGIT)


def thompson_by_recurrence(T: int) -> dict[int, np.ndarray]:
    """Expected pulls of arm 1 for both rows of ARMS, with P(X > Y) from a recurrence, no integral.

    weights[m][a, b, c] is the probability of a successes and b failures of arm 0 and c successes
    of arm 1 (the rest being its failures), first[a, b, c] that arm 0 is then chosen.
    """
    weights = [np.ones((1, 1, 1)) for _ in ARMS]
    first = np.zeros((0, 0, 0))
    spent, out = np.zeros(2), {}
    for t in range(T):
        first = beats_level(t, first)
        for m, (p, q) in enumerate(ARMS):
            old, new = weights[m], np.zeros((t + 2,) * 3)
            spent[m] += (old * (1 - first)).sum()
            new[1:, :-1, :-1] += old * first * p
            new[:-1, 1:, :-1] += old * first * (1 - p)
            new[:-1, :-1, 1:] += old * (1 - first) * q
            new[:-1, :-1, :-1] += old * (1 - first) * (1 - q)
            weights[m] = new
        out[t + 1] = spent.copy()
    return out


def beats_level(t: int, before: np.ndarray) -> np.ndarray:
    """P(X > Y), X ~ Beta(a + 1, b + 1), Y ~ Beta(c + 1, d + 1), where a + b + c + d = t.

    From the level before: P(a + 1, ...) = P(a, ...) + B(a + c, b + d) / (a B(a, b) B(c, d)), and
    P = B(c, b + d) / B(c, d) where the first parameter is 1.
    """
    out = np.zeros((t + 1,) * 3)
    a, b, c = (x + 1.0 for x in np.nonzero(np.indices(out.shape).sum(axis=0) <= t))
    d = t + 4.0 - a - b - c
    place = tuple(x.astype(int) - 1 for x in (a, b, c))
    lowest = a == 1
    values = np.empty(a.size)
    values[lowest] = np.exp(special.betaln(c, b + d) - special.betaln(c, d))[lowest]
    x, rest = a[~lowest] - 1, (b[~lowest], c[~lowest], d[~lowest])
    log = special.betaln(x + rest[1], rest[0] + rest[2])
    log -= special.betaln(x, rest[0]) + special.betaln(rest[1], rest[2])
    below = tuple(p[~lowest] - (k == 0) for k, p in enumerate(place))
    values[~lowest] = (before[below] if t else 0.0) + np.exp(log) / x
    out[place] = values
    return out


def beats(a: float, b: float, c: float, d: float) -> float:
    """P(X > Y) for X ~ Beta(a, b), Y ~ Beta(c, d) and an integer a, as a finite sum."""
    i = np.arange(a)
    log = special.betaln(c + i, b + d) - np.log(b + i) - special.betaln(1.0 + i, b)
    return float(np.exp(log - special.betaln(c, d)).sum())


def test_thompson_propensities_equal_the_closed_form():
    rng = np.random.default_rng(0)
    policy = make_policy("thompson")
    for pulls in (3, 20, 100, 1000):
        policy.reset(2, seed=0)
        for _ in range(pulls):
            policy.update(int(rng.integers(2)), float(rng.random() < 0.6))
        s = policy._views
        a, c = s.rows[0] + 1
        b, d = s.rows[1] + 1
        assert policy.probabilities()[0] == pytest.approx(beats(a, b, c, d), abs=1e-12)


def test_thompson_chooses_with_its_propensities():
    """More arms than share a word of random bits, one masked, few and many pulls between them."""
    rng = np.random.default_rng(1)
    policy, n = make_policy("thompson"), 200_000
    for pulls in (10, 300):
        policy.reset(11, seed=2)
        for _ in range(pulls):
            policy.update(int(rng.integers(11)), float(rng.random() < 0.5))
        mask = np.arange(11) != 6
        p = policy.probabilities(mask)
        counts = np.bincount([policy.select(mask) for _ in range(n)], minlength=11)
        assert counts[6] == p[6] == 0.0
        assert stats.chisquare(counts[mask], n * p[mask] / p[mask].sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("T", "gamma", "regret"), [(6, 0.3, 0.866209479755), (10, 0.1, 1.454930361279)]
)
def test_exp3_has_the_exact_expected_regret(T, gamma, regret):
    """All reward sequences of two arms; a reward of 0 moves no weight, so paths merge."""
    policy = make_policy("exp3", gamma=gamma)
    policy.reset(2, seed=0)
    paths = {(0.0, 0.0): 1.0}
    lost = 0.0
    for _ in range(T):
        later: dict[tuple[float, float], float] = {}
        for weights, chance in paths.items():
            policy._views.rows[0] = weights
            policy.prepare(policy._views)
            p = policy.probabilities()
            lost += chance * p[1] * (ARMS[0, 0] - ARMS[0, 1])
            for arm in range(2):
                for reward in (0.0, 1.0):
                    policy._views.rows[0] = weights
                    policy.prepare(policy._views)
                    policy.update(arm, reward, propensity=p[arm])
                    key = tuple(policy._views.rows[0].tolist())
                    q = ARMS[0, arm] if reward else 1.0 - ARMS[0, arm]
                    later[key] = later.get(key, 0.0) + chance * p[arm] * q
        paths = later
    assert sum(paths.values()) == pytest.approx(1.0, abs=1e-12)
    assert lost == pytest.approx(regret, abs=5e-13)


def regret_of(name: str, means: np.ndarray, T: int, runs: int) -> tuple[float, float]:
    policy = make_policy(name)
    module = specialise(engine, **policy.kernels())
    seeds = np.random.SeedSequence(2026).spawn(2 * runs)
    streams = np.array([make_stream(s) for s in seeds]).reshape(runs, 2, 4)
    regrets = module.regrets(policy.fresh_buffer(means.size), streams, means, T)
    return regrets.mean(), regrets.std(ddof=1) / math.sqrt(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runs", "published", "error"),
    [("ucb:beta=1", 600, 229.31, 0.20), ("thompson", 300, 45.67, 0.46)],
)
def test_monte_carlo_regret_agrees_with_the_published_one(name, runs, published, error):
    mean, se = regret_of(name, np.array([0.3, 0.4, 0.5, 0.6, 0.7]), 10_000, runs)
    assert abs(mean - published) < 3.0 * math.hypot(se, error)
    assert 3.0 * se < 0.1 * published  # the interval is narrow enough to mean something
