"""The stream's normal, gamma and beta draws against scipy's distributions; best-arm quadrature."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numba import njit
from scipy import integrate, special, stats

from metasd_bandits.compiled import draws
from metasd_bandits.compiled.best_arm import BETA, GAUSSIAN, best_arm_probabilities
from metasd_bandits.compiled.stream import make_stream, uniform


@njit
def sample(kind, stream, a, b, n):
    out = np.empty(n)
    for i in range(n):
        if kind == 0:
            out[i] = draws.normal(stream)
        elif kind == 1:
            out[i] = draws.gamma(stream, a, draws.gamma_spreads(a, 1.0)[0])
        elif kind == 2:
            x, rest = draws.beta(stream, a, b, *draws.gamma_spreads(a, b))
            out[i] = x / rest
        else:
            out[i] = uniform(stream)
    return out


CASES = [(0, 0.0, 0.0, stats.norm()), (3, 0.0, 0.0, stats.uniform())]
CASES += [(1, a, 0.0, stats.gamma(a)) for a in (0.1, 0.5, 1.0, 1.5, 7.0, 1e4)]
CASES += [
    (2, a, b, stats.betaprime(a, b))
    for a, b in ((1.0, 1.0), (0.1, 0.1), (0.5, 3.0), (30.0, 2.0), (4e4, 6e4))
]


@pytest.mark.parametrize(("kind", "a", "b", "law"), CASES)
def test_draws_follow_their_law(kind, a, b, law):
    n = 200_000
    x = sample(kind, make_stream(17), a, b, n)
    assert stats.kstest(x, law.cdf).pvalue > 1e-3
    if kind != 2:  # odds may have no mean
        assert abs(x.mean() - law.mean()) < 4.5 * law.std() / math.sqrt(n)
    for tail in (1e-4, 1 - 1e-4):  # the rare branches: the ziggurat's tail and wedges
        share = (x < law.ppf(tail)).mean()
        assert abs(share - tail) < 5 * math.sqrt(1e-4 / n)


def test_the_ziggurat_closes_at_the_top():
    edges = draws._EDGE
    top_area = edges[255] * (1.0 - math.exp(-0.5 * edges[255] ** 2))
    area = edges[0] * math.exp(-0.5 * edges[1] ** 2)
    assert top_area == pytest.approx(area, rel=1e-9)
    assert (np.diff(edges) < 0).all()


def test_the_squeeze_of_gamma_draws_accepts_nothing_that_the_exact_test_would_not():
    for d in [2 / 3, *np.geomspace(0.667, 1e6, 100)]:
        c = 1 / math.sqrt(9 * d)
        x = np.linspace(-1 / c, 20, 20_002)[1:]
        v = (1 + c * x) ** 3
        exact = np.exp(0.5 * x**2 + d * (1 - v + np.log(v)))
        assert (1 - draws.SQUEEZE * (c * x**2) ** 2 < exact + 1e-13).all()


def test_xoshiro_gives_the_reference_words():
    """First outputs for the state 1, 2, 3, 4, computed from the definition in Python integers."""
    state, mask, expected = [1, 2, 3, 4], (1 << 64) - 1, []
    for _ in range(100):
        total = (state[0] + state[3]) & mask
        expected.append((((total << 23) | (total >> 41)) & mask) + state[0] & mask)
        t = (state[1] << 17) & mask
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= t
        state[3] = ((state[3] << 45) | (state[3] >> 19)) & mask
    stream = np.array([1, 2, 3, 4], np.uint64)
    x = sample(3, stream, 0.0, 0.0, 100)
    assert x.tolist() == [(w >> 11) * 2.0**-53 for w in expected]
    assert stream.tolist() == state


def best(model, first, second, available=None):
    out = np.zeros(len(first))
    mask = np.ones(out.size) if available is None else np.array(available, float)
    best_arm_probabilities(model, np.array(first, float), np.array(second, float), mask, out)
    return out


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([0.1, 0.5, 2.0], [0.1, 3.0, 0.7]),
        ([300, 20, 1], [200, 30, 1]),
        ([5e4, 5e4 + 100, 12.0], [5e4, 5e4, 9.0]),
        ([1e6, 1.0], [10.0, 1.0]),
    ],
)
def test_beta_quadrature_agrees_with_scipy(a, b):
    found, arms = best(BETA, a, b), list(zip(a, b, strict=True))
    centres = [math.log(x / y) for x, y in arms]
    widths = [math.sqrt(1 / x + 1 / y) for x, y in arms]
    cuts = sorted(
        c + k * w
        for c, w in zip(centres, widths, strict=True)
        for k in (-100, -40, -15, -5, -2, 0, 2, 5, 15, 40, 100)
    )

    def integral(function):
        return sum(
            integrate.quad(function, lo, hi, epsabs=1e-14, epsrel=1e-12, limit=200)[0]
            for lo, hi in itertools.pairwise(cuts)
        )

    for i, (x, y) in enumerate(arms):
        peak = -x * np.logaddexp(0, -centres[i]) - y * np.logaddexp(0, centres[i])

        def own(z, x=x, y=y, peak=peak):
            return math.exp(-x * np.logaddexp(0, -z) - y * np.logaddexp(0, z) - peak)

        def winning(z, i=i, own=own):
            """The others through scipy's incomplete beta function."""
            others = (special.betainc(*o, special.expit(z)) for j, o in enumerate(arms) if j != i)
            return own(z) * math.prod(others)

        assert found[i] == pytest.approx(integral(winning) / integral(own), abs=1e-10)


def test_a_uniform_rival_is_beaten_with_the_probability_of_the_mean():
    assert best(BETA, [1e6, 1.0], [10.0, 1.0])[0] == pytest.approx(1e6 / (1e6 + 10), rel=1e-14)
    assert best(BETA, [0.3, 1.0], [0.2, 1.0])[0] == pytest.approx(0.6, abs=1e-13)


def test_gaussian_quadrature_equals_the_closed_form():
    for m, s in (([0.5, 0.5], [0.1, 0.3]), ([0.2, 0.9], [0.5, 0.01]), ([0.0, 0.1], [1e-4, 1e-4])):
        gap = (m[0] - m[1]) / math.hypot(*s)
        assert best(GAUSSIAN, m, s)[0] == pytest.approx(stats.norm.cdf(gap), abs=1e-13)


def test_quadrature_leaves_masked_arms_out():
    p = best(BETA, [3, 1, 9], [2, 1, 9], available=[1, 0, 1])
    assert p[1] == 0.0
    assert p[[0, 2]] == pytest.approx(best(BETA, [3, 9], [2, 9]), abs=1e-14)


def test_many_equal_arms_share_equally():
    assert best(BETA, [2.0] * 100, [5.0] * 100) == pytest.approx(np.full(100, 0.01), abs=1e-14)
