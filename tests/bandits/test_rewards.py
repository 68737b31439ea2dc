"""Rewards lie in [0, 1] and order drafters as they should."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_bandits import REWARDS, ConfigError, Round, make_reward

N = 5


def a_round(accepted, step=1.0, drafted=N):
    return Round("q", 0, 0, drafted, accepted, accepted + 1, accepted / N, 0.3, 0.0, step=step)


@given(st.integers(0, N), st.floats(0.01, 100.0))
def test_every_reward_lies_in_the_unit_interval(accepted, step):
    for name in REWARDS:
        assert 0.0 <= make_reward(name)(a_round(accepted, step), N) <= 1.0


def test_tokens_per_round_is_block_efficiency_moved():
    for k in range(N + 1):
        r = a_round(k)
        be = make_reward("be")(r, N)
        assert make_reward("tokens")(r, N) == pytest.approx((N * be + 1) / (N + 1))
    assert make_reward("tokens")(a_round(0, drafted=0), N) == pytest.approx(1 / 6)


def test_throughput_prefers_the_cheap_drafter_where_block_efficiency_does_not():
    cheap, dear = a_round(2, step=1.0), a_round(3, step=2.0)
    assert make_reward("be")(cheap, N) < make_reward("be")(dear, N)
    assert make_reward("throughput")(cheap, N) == pytest.approx(3 / 6)
    assert make_reward("throughput")(cheap, N) > make_reward("throughput")(dear, N)
    plain = a_round(0, drafted=0)
    assert make_reward("throughput")(plain, N) == pytest.approx(1 / 6)


@pytest.mark.parametrize("step", [math.nan, 0.0, -1.0, math.inf])
def test_throughput_refuses_rounds_that_were_not_timed(step):
    with pytest.raises(ValueError, match="positive, finite duration"):
        make_reward("throughput")(dataclasses.replace(a_round(1), step=step), N)


def test_unknown_rewards_are_named_with_the_near_match():
    with pytest.raises(ConfigError, match="did you mean 'tokens'"):
        make_reward("token")
