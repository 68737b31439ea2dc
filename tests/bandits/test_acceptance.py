"""The truncated geometric law against its own probabilities, the quotients in print, and scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from metasd_bandits import ConfigError
from metasd_bandits.theory import acceptance as acc

alphas = st.floats(0.001, 0.999)
lengths = st.integers(1, 16)


@given(alphas, lengths)
def test_moments_are_those_of_the_probabilities(alpha, N):
    p, k = acc.accepted_pmf(alpha, N), np.arange(N + 1)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert acc.mean_accepted(alpha, N) == pytest.approx(p @ k, abs=1e-10)
    assert acc.var_accepted(alpha, N) == pytest.approx(p @ k**2 - (p @ k) ** 2, abs=1e-9)


@given(st.floats(0.01, 0.95), lengths)
def test_moments_are_the_quotients_in_print(alpha, N):
    a = alpha
    mean = (a - a ** (N + 1)) / (1 - a)
    second = 2 * a * (1 - (N + 1) * a**N + N * a ** (N + 1)) / (1 - a) ** 2 - mean
    assert acc.mean_accepted(a, N) == pytest.approx(mean, rel=1e-9)
    assert acc.var_accepted(a, N) == pytest.approx(second - mean**2, rel=1e-6, abs=1e-10)
    assert acc.tokens_per_round(a, N) == pytest.approx((1 - a ** (N + 1)) / (1 - a), rel=1e-9)


@given(alphas, alphas, lengths)
def test_divergence_is_that_of_the_probabilities(a, b, N):
    expected = entropy(acc.accepted_pmf(a, N), acc.accepted_pmf(b, N))
    assert acc.kl(a, b, N) == pytest.approx(expected, rel=1e-7, abs=1e-9)


@given(st.floats(0.0, 1.0), lengths)
def test_inverse(alpha, N):
    g = acc.tokens_per_round(alpha, N)
    assert acc.tokens_per_round(acc.alpha_from_tokens(g, N), N) == pytest.approx(g, rel=1e-12)


def test_limits():
    assert acc.mean_accepted(np.array([0.0, 1.0]), 5).tolist() == [0.0, 5.0]
    assert acc.var_accepted(np.array([0.0, 1.0]), 5).tolist() == [0.0, 0.0]
    assert acc.kl(0.3, 1.0, 5) == np.inf
    assert acc.kl(1.0, 0.3, 5) == pytest.approx(-5 * np.log(0.3))
    assert acc.kl(0.0, 0.0, 5) == 0.0
    assert acc.bernoulli_kl(0.1, 0.9) == pytest.approx(1.757779, abs=1e-6)
    assert acc.bernoulli_kl(0.4, 0.5) == pytest.approx(0.020135, abs=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: acc.accepted_pmf(1.1, 5),
        lambda: acc.mean_accepted([0.2, float("nan")], 5),
        lambda: acc.tokens_per_round(0.5, 0),
        lambda: acc.alpha_from_tokens(6.5, 5),
    ],
)
def test_impossible_values_are_refused(call):
    with pytest.raises(ConfigError, match=r"range|integer"):
        call()
