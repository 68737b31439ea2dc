"""Faults that users met in bandit libraries, reproduced on ours."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from metasd_bandits import POLICIES, ConfigError, make_policy
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.policies.kl_ucb import kl_bernoulli, kl_bernoulli_upper
from metasd_bandits.policies.sh import halving

sys.path.insert(0, str(Path(__file__).parent))
import engine

EXPONENTIAL = ["exp3", "exp3-ix", "exp3s", "exp3spec", "hedge"]
INDEX = ["ucb", "ucb-tuned", "ucb-v", "kl-ucb", "ucbspec", "sw-ucb", "d-ucb", "ratio-ucb"]


def play(policy, means, rounds, seed=0, start=0):
    rng = np.random.default_rng([seed, start])
    for _ in range(rounds):
        arm = policy.select()
        policy.update(arm, float(rng.random() < means[arm]))
    return policy


def test_exp3_after_ten_million_extreme_rewards():
    """Others overflow after 200,000 unit rewards at gamma = .01."""
    for gamma in (0.01, 1.0):
        policy = make_policy("exp3", gamma=gamma)
        policy.reset(5, seed=0)
        specialise(engine, **policy.kernels()).extremes(policy._buffer, 10_000_000, gamma / 5)
        assert policy.pulls.sum() == 10_000_000
        p = policy.probabilities()
        assert p.sum() == pytest.approx(1.0, abs=1e-12)
        assert p.min() == pytest.approx(gamma / 5, rel=1e-9)
        assert 0 <= policy.select() < 5


def test_exp3_weighs_by_its_log_weights_whatever_their_scale():
    rng, policy = np.random.default_rng(3), make_policy("exp3", gamma=0.2)
    policy.reset(4, seed=0)
    for t in range(3000):
        arm = int(rng.integers(4)) if t < 1500 else 0  # in the end it leads by e^74
        policy.update(arm, float(rng.random()), propensity=0.5)
        if t % 500 == 0:
            policy.forget(0.9)
            policy.rearrange([1, 0, None, 2])
        mask = rng.random(4) < 0.7
        if not mask.any():
            continue
        w = np.where(mask, np.exp(policy._views.rows[0] - policy._views.rows[0][mask].max()), 0.0)
        expected = np.where(mask, 0.8 * w / w.sum() + 0.2 / mask.sum(), 0.0)
        assert policy.probabilities(mask) == pytest.approx(expected, abs=1e-14)
    policy.update(0, 1.0, propensity=1e-5)
    assert policy._views.rows[0, 0] > policy._views.rows[0, 1:].max() + 800  # e^-800 is 0
    p = policy.probabilities([False, True, True, True])
    w = np.exp(policy._views.rows[0, 1:] - policy._views.rows[0, 1:].max())
    assert p[1:] == pytest.approx(0.8 * w / w.sum() + 0.2 / 3, abs=1e-14)


@pytest.mark.parametrize("name", EXPONENTIAL)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_exponential_weights_survive_improbable_arms(name, reward):
    policy = make_policy(name)
    policy.reset(3, seed=0)
    for i in range(5000):
        policy.update(i % 3 if i < 2500 else 0, reward, propensity=1e-12)
    p = policy.probabilities()
    assert np.isfinite(p).all()
    assert p.sum() == pytest.approx(1.0, abs=1e-12)


def test_ucbspec_follows_the_formula_with_own_pulls():
    """BanditSpec's UCB divided by all pulls, so that every arm had the same bonus."""
    policy = make_policy("ucbspec")
    for seed in range(20):
        policy.reset(3, seed=seed)
        play(policy, [0.2, 0.5, 0.8], 150, seed)
        n, mean, t, L, delta = policy.pulls, policy.means, 151, 7, 0.5
        tokens = 1 + L * mean
        radius = (L / 2) * np.sqrt(
            (1 + n) / n**2 * (1 + 2 * np.log(3 * t**2 * np.sqrt(1 + n) / delta))
        )
        assert policy.probabilities().argmax() == (tokens + radius).argmax()
        s = policy._views
        policy._live.select(policy._buffer.copy(), policy._stream.copy())
        assert s.pulls.sum() == 150
        policy.select()
        assert policy._views.score * L + 1 == pytest.approx(tokens + radius, rel=1e-12)
    best = sum(
        play_fresh("ucbspec", [0.3, 0.5, 0.9], 800, seed).pulls.argmax() == 2 for seed in range(50)
    )
    assert best == 50


def play_fresh(name, means, rounds, seed):
    policy = make_policy(name)
    policy.reset(len(means), seed=seed)
    return play(policy, means, rounds, seed)


def test_exp3spec_follows_the_formula():
    policy = make_policy("exp3spec")
    policy.reset(4, seed=3)
    losses, L = np.zeros(4), 7
    for t in range(1, 60):
        eta = math.sqrt(math.log(4) / (t * 4))
        expected = np.exp(-eta * losses)
        p = policy.probabilities()
        assert p == pytest.approx(expected / expected.sum(), rel=1e-12)
        arm, propensity = policy.decide()
        tokens = 1 + (t + arm) % (L + 1)
        policy.update(arm, (tokens - 1) / L)
        losses[arm] += (L + 1 - tokens) / (L * propensity)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_nan_ever_and_zero_rewards_do_not_win(name):
    """A trimmed mean that is NaN below ten samples; a zero-reward arm with an infinite index."""
    policy = make_policy(name)
    policy.reset(4, seed=0)
    for _ in range(40):
        assert np.isfinite(policy.probabilities()).all()
        arm = policy.select()
        policy.update(arm, 0.0 if arm == 0 else 0.9)
    if name not in {"fixed", "uniform", "round-robin", "exp3s", "exp3", "exp3-ix", "exp3spec"}:
        assert policy.pulls[0] <= policy.pulls[1:].max()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_bad_reward_changes_nothing(name):
    policy = make_policy(name)
    policy.reset(3, seed=0)
    play(policy, [0.2, 0.5, 0.7], 30)
    before = policy.state_dict()
    for bad in (math.nan, math.inf, -math.inf, -1e-9, 1.0 + 1e-9):
        with pytest.raises(ValueError, match="outside"):
            policy.update(0, bad)
        with pytest.raises(ValueError, match="leave"):
            policy.update(0, 0.5, rewards=[0.5, bad, 0.5])
    with pytest.raises((ValueError, TypeError)):
        policy.update("0", 0.5)
    with pytest.raises(TypeError):
        policy.update(0.5, 0.5)
    with pytest.raises(TypeError):
        policy.update(0, "much")
    assert policy.state_dict() == before


def test_discounting_decays_every_arm():
    """SMPyBandits discounts the pulled arm alone, and truncates to integers."""
    policy = make_policy("d-ucb", gamma=0.9)
    policy.reset(2, seed=0)
    for arm, reward in ((0, 0.5), (0, 0.25), (1, 1.0), (1, 0.75)):
        policy.update(arm, reward)
    counts, totals = policy._views.rows[0], policy._views.rows[1]
    assert counts == pytest.approx([0.9**3 + 0.9**2, 0.9 + 1.0], rel=1e-14)
    assert totals == pytest.approx([0.5 * 0.9**3 + 0.25 * 0.9**2, 0.9 + 0.75], rel=1e-14)


def test_a_window_shorter_than_the_arms_is_refused():
    with pytest.raises(ConfigError, match=r"window=5 is out of range; give an integer of at least"):
        make_policy("sw-ucb:window=5").reset(10)
    policy = make_policy("sw-ucb:window=10")
    policy.reset(10, seed=0)
    play(policy, np.full(10, 0.5), 200)
    assert policy.pulls.min() > 0


def test_a_window_forgets_exactly():
    policy = make_policy("sw-ucb:window=7")
    policy.reset(3, seed=0)
    rng = np.random.default_rng(0)
    log = []
    for _ in range(100):
        arm, reward = policy.select(), float(rng.random())
        policy.update(arm, reward)
        log.append((arm, reward))
        for i in range(3):
            held = [r for a, r in log[-7:] if a == i]
            assert policy._views.rows[0, i] == len(held)
            assert policy._views.rows[1, i] == pytest.approx(sum(held), abs=1e-12)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"fixed", "etc", "sh", "ucb2"}))
def test_an_arm_added_at_run_time_is_pulled(name):
    """In one library it got 0 of 500 pulls."""
    policy = make_policy(name)
    policy.reset(2, seed=0)
    play(policy, [0.2, 0.3], 200)
    before = policy.pulls.tolist()
    policy.rearrange([1, None, 0])
    assert policy.pulls.tolist() == [before[1], 0, before[0]]
    if name in INDEX:
        assert policy.probabilities().tolist() == [0.0, 1.0, 0.0]
    play(policy, [0.3, 0.9, 0.2], 500, start=1)
    assert policy.pulls[1] > 100


def test_removed_arms_leave_the_rest_as_they_were():
    for name in ("ucb", "kl-ucb", "sw-ucb:window=50", "d-ucb", "thompson", "exp3", "cd-ucb"):
        policy = make_policy(name)
        policy.reset(4, seed=0)
        play(policy, [0.2, 0.3, 0.5, 0.4], 80)
        means = policy.means
        policy.rearrange([3, 1])
        assert policy.means.tolist() == means[[3, 1]].tolist()
        assert policy.probabilities().sum() == pytest.approx(1.0)
        play(policy, [0.4, 0.3], 80, start=1)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_restored_copy_does_not_diverge(name):
    """Elsewhere the seed was saved, not the stream's position."""
    policy = make_policy(name)
    policy.reset(3, seed=5)
    play(policy, [0.4, 0.5, 0.6], 33)
    twin = make_policy(name)
    twin.load_state_dict(policy.state_dict())
    for each in (policy, twin):
        play(each, [0.4, 0.5, 0.6], 100, start=1)
    assert policy.state_dict() == twin.state_dict()


@pytest.mark.parametrize("name", [*INDEX, "epsilon-greedy", "etc", "sh", "ucb2", "cd-ucb"])
def test_pulls_in_flight_are_counted(name):
    """Rows that decide before any reward is back drew the same unplayed arm again and again."""
    policy = make_policy(name)
    for seed in range(10):
        policy.reset(6, seed=seed)
        assert sorted(policy.select() for _ in range(6)) == list(range(6))


def test_ucb_spreads_a_batch_by_pulls_in_flight():
    policy = make_policy("ucb")
    policy.reset(2, seed=0)
    for arm in (0, 1):
        policy.update(arm, 0.5)
    batch = [policy.select() for _ in range(8)]
    assert batch.count(0) == batch.count(1) == 4


@pytest.mark.parametrize("name", ["exp3", "exp3-ix", "exp3s", "exp3spec", "hedge"])
def test_late_rewards_are_weighted_by_the_propensity_at_their_decision(name):
    """Also when the same arm is in flight twice, decided under two propensities."""
    policy, direct = make_policy(name), make_policy(name)
    policy.reset(2, seed=0)
    direct.reset(2, seed=0)
    one = [True, False]
    policy.select(one)  # in flight, propensity 1
    policy.probabilities()
    policy._views.available[:] = 1.0
    first = policy.probabilities()[0]
    policy.select(one)
    for propensity, reward in ((first, 0.25), (1.0, 0.5)):
        policy.update(0, reward, propensity=propensity)
        direct.update(0, reward, propensity=propensity)
    assert policy.probabilities().tolist() == direct.probabilities().tolist()
    assert policy._views.pending.tolist() == [0.0, 0.0]


def test_exp3_in_batches_is_unbiased():
    """The mean of the importance-weighted estimates is the mean reward of every arm."""
    policy = make_policy("exp3", gamma=0.5)
    means, estimates = np.array([0.2, 0.7, 0.4]), np.zeros(3)
    runs = 3000
    for seed in range(runs):
        policy.reset(3, seed=seed)
        batch = [policy.decide() for _ in range(4)]
        for arm, propensity in batch:
            estimates[arm] += means[arm] / propensity / (4 * runs)
            policy.update(arm, means[arm], propensity=propensity)
    assert estimates == pytest.approx(means, abs=0.03)


def test_sequential_halving_keeps_its_schedule():
    assert halving(5, 20) == [(1, 3), (3, 2), (6, 1)]
    policy = make_policy("sh:budget=20")
    policy.reset(5, seed=0)
    pulls, survivors = [], []
    for t in range(17):
        arm = policy.select()
        policy.update(arm, [0.1, 0.2, 0.3, 0.4, 0.5][arm])
        pulls.append(policy.pulls.tolist())
        if t in (4, 10, 16):
            survivors.append(int(5 - policy._views.rows[0].sum()))
    assert survivors == [3, 2, 1]
    assert pulls[-1] == [1, 1, 3, 6, 6]
    assert {policy.select() for _ in range(10)} == {4}
    assert halving(7, 100) == [(4, 4), (12, 2), (28, 1)]
    assert 4 * 7 + 8 * 4 + 16 * 2 == 92
    assert halving(1, 10) == []
    single = make_policy("sh")
    single.reset(1, seed=0)
    assert [single.select() for _ in range(5)] == [0] * 5
    with pytest.raises(ConfigError, match=r"budget \(for 5 arms\)=14 .* at least 15"):
        make_policy("sh:budget=14").reset(5)


def test_halving_waits_for_late_rewards():
    policy = make_policy("sh:budget=20")
    policy.reset(5, seed=0)
    arms = [policy.select() for _ in range(12)]
    assert sorted(arms[:5]) == list(range(5))
    assert policy._views.memory[0] == 0  # no reward is back: nobody is eliminated
    for arm in arms:
        policy.update(arm, [0.1, 0.2, 0.3, 0.4, 0.5][arm])
    assert policy._views.memory[0] >= 1
    assert policy._views.rows[0, 4] == 0.0


def test_bernoulli_divergence_at_its_limits():
    listed = {(0.1, 0.9): 1.757779, (0.4, 0.5): 0.020135}  # cut off behind the sixth digit
    for (p, q), value in listed.items():
        assert math.floor(1e6 * kl_bernoulli(p, q)) == round(1e6 * value)
    assert kl_bernoulli(0.0, 0.0) == kl_bernoulli(1.0, 1.0) == 0.0
    assert kl_bernoulli(0.0, 0.3) == pytest.approx(-math.log(0.7), rel=1e-15)
    assert kl_bernoulli(1.0, 0.3) == pytest.approx(-math.log(0.3), rel=1e-15)
    assert kl_bernoulli(0.5, 0.0) == kl_bernoulli(0.5, 1.0) == math.inf
    for p in (0.0, 1e-300, 1e-9, 0.3, 0.999999, 1.0):
        for budget in (0.0, 1e-12, 0.01, 1.0, 50.0, 1e6):
            q = kl_bernoulli_upper(p, budget)
            assert p <= q <= 1.0
            if q < 1.0 and p > 0.0:
                assert kl_bernoulli(p, q) == pytest.approx(budget, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("name", [*INDEX, "thompson", "sh", "etc", "epsilon-greedy", "cd-ucb"])
def test_the_best_arm_wins(name):
    policy = make_policy(name)
    for seed in range(5):
        policy.reset(5, seed=seed)
        play(policy, [0.05, 0.1, 0.1, 0.05, 0.95], 600, seed)
        assert policy.pulls.argmax() == 4, name


def test_ratio_ucb_maximises_reward_per_time():
    """Arm 1 earns more in a round, arm 0 more per unit of time: E[r]/E[c] = .45 against .32."""
    rng = np.random.default_rng(0)
    for name, winner in (("ratio-ucb:beta=0.5", 0), ("ucb:beta=0.5", 1)):
        policy = make_policy(name)
        policy.reset(2, seed=0)
        for _ in range(3000):
            arm = policy.select()
            reward = float(rng.random() < [0.5, 0.6][arm])
            policy.update(arm, reward, cost=[1.1, 1.9][arm] + 0.05 * rng.random())
        assert policy.pulls.argmax() == winner
        assert policy.pulls[winner] > 2000


def test_ratio_ucb_takes_the_ratio_of_means_not_the_mean_of_ratios():
    """E[r/c] prefers arm 1 (reward and cost rise together there); E[r]/E[c] prefers arm 0."""
    policy = make_policy("ratio-ucb:beta=0.5")
    policy.reset(2, seed=0)
    rng = np.random.default_rng(1)
    for _ in range(4000):
        arm = policy.select()
        if arm == 0:
            policy.update(0, 0.5, cost=1.5)  # .333
        else:
            reward, cost = (0.0, 2.0) if rng.random() < 0.5 else (0.9, 1.0)
            policy.update(1, reward, cost=cost)  # .300, though the mean ratio is .450
    assert policy.pulls[0] > 2000


def test_hedge_learns_from_all_rewards():
    policy = make_policy("hedge")
    policy.reset(3, seed=0)
    total = np.zeros(3)
    rng = np.random.default_rng(0)
    for t in range(1, 50):
        expected = np.exp(math.sqrt(8 * math.log(3) / t) * (total - total.max()))
        assert policy.probabilities() == pytest.approx(expected / expected.sum(), rel=1e-10)
        rewards = rng.random(3)
        arm = policy.select()
        policy.update(arm, rewards[arm], rewards=rewards)
        total += rewards - 1
