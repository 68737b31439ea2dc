"""Beta draws above a level against scipy's law and against the bounds that leave them out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from scipy import stats

from metasd_bandits.compiled import beta_tail
from metasd_bandits.compiled.stream import make_stream, uniform

shapes = st.one_of(st.floats(1.0, 20.0), st.floats(1.0, 1e6), st.integers(1, 50).map(float))


@njit
def surely_below(u, x, rest, mode, w, peak):
    return beta_tail.surely_below(u, x, rest, mode, w, peak)


@njit
def described(a, b):
    return beta_tail.tail_weight(a, b), beta_tail.peak_bound(a, b)


@njit
def draws(stream, x, a, b, n):
    """Odds beyond x, by the rule that Thompson sampling follows; 0 for draws below, and w = 0."""
    w, peak = beta_tail.tail_weight(a, b), beta_tail.peak_bound(a, b)
    mode, rest, out = (a - 1.0) / (a + b - 2.0), 1.0 - x, np.zeros(n)
    if not beta_tail.surely_below(1.0, x, rest, mode, w, peak):
        raise ValueError("q is not known to be below 1")
    for i in range(n):
        u = uniform(stream)
        if not beta_tail.surely_below(u, x, rest, mode, w, peak):
            out[i] = beta_tail.odds_beyond(stream, u, x, rest, a, b)
    return out


@given(a=shapes, b=shapes, share=st.floats(0.0, 1.0), u=st.floats(0.0, 1.0, exclude_max=True))
def test_what_is_left_out_lies_beyond_the_tangent(a, b, share, u):
    w, peak = described(a, b)
    if w == 0.0:
        return
    mode = (a - 1.0) / w
    law = stats.beta(a, b)
    assert peak >= law.pdf(mode) * (1 - 1e-7)
    x = mode + share * (1.0 - mode)
    rest = 1.0 - x
    if rest <= 0.0 or not surely_below(u, x, rest, mode, w, peak):
        return
    slope = (b - 1.0) / rest - (a - 1.0) / x
    assert u >= law.pdf(x) / slope * (1 - 1e-7) >= law.sf(x) * (1 - 1e-6)


@pytest.mark.parametrize("below_one", [(0.5, 3.0), (3.0, 0.5), (0.1, 0.1), (1.0, 1.0)])
def test_shapes_without_a_tangent_leave_nothing_out(below_one):
    w, peak = described(*below_one)
    assert w == 0.0
    assert not any(surely_below(1.0, x, 1.0 - x, 0.0, w, peak) for x in np.linspace(0, 1, 101))


@pytest.mark.parametrize(
    ("a", "b", "x"),
    [
        (1.0, 4.0, 0.5),
        (2.0, 2.0, 0.9),
        (5.5, 2.25, 0.95),
        (30.0, 20.0, 0.75),
        (300.0, 200.0, 0.65),
        (4e4, 6e4, 0.404),
        (1.0, 1e5, 3e-5),
    ],
)
def test_draws_beyond_a_level_follow_the_law(a, b, x):
    n = 2_000_000
    odds = draws(make_stream(5), x, a, b, n)
    law, above = stats.beta(a, b), odds[odds > 0.0]
    chance = law.sf(x)
    assert abs(above.size / n - chance) < 4.5 * math.sqrt(chance * (1 - chance) / n)
    found = above / (1.0 + above)
    assert (found >= x * (1 - 1e-12)).all()
    assert stats.kstest(found, lambda y: 1.0 - law.sf(y) / chance).pvalue > 1e-3
