"""The numbers and the proved inequalities of docs/theory.md."""

import doctest
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from metasd_bandits.theory import acceptance

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_numbers_on_the_page():
    failed, tried = doctest.testfile(str(DOCS / "theory.md"), module_relative=False)
    assert tried > 5
    assert failed == 0


@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=6), st.integers(1, 8))
def test_regret_in_rounds_is_within_a_factor_of_regret_in_bd(alphas, N):
    a = np.array(alphas)
    best = a.max()
    pulls = np.arange(1.0, len(a) + 1)
    g = acceptance.tokens_per_round(a, N)
    slope = np.arange(1, N + 1) @ best ** np.arange(N)
    bd = (best - a) @ pulls
    rounds = (1 - g / g.max()) @ pulls
    assert (g.max() - 1) / (g.max() * best) * bd <= rounds * (1 + 1e-9) + 1e-12
    assert rounds <= slope / g.max() * bd * (1 + 1e-9) + 1e-12


def test_positions_that_move_together_in_a_narrow_range_satisfy_c_of_n():
    """So independent positions are not necessary: mean of n two-valued rewards, by enumeration."""
    N = 4
    width = N**-0.5
    for p in (0.1, 0.5, 0.8):
        for n in (1, 2, 5, 20, 60):
            k = np.arange(n + 1)
            above = width * (k / n - p)  # how far k high rewards lie above the mean
            reached = stats.binom.sf(k - 1, n, p)
            high = above > 0
            assert (reached[high] <= np.exp(-2 * N * n * above[high] ** 2)).all()
            below = stats.binom.cdf(k, n, p)
            assert (below[~high] <= np.exp(-2 * N * n * above[~high] ** 2) + 1e-12).all()
