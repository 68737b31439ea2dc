"""Properties that hold for every history, by hypothesis."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_bandits import make_policy
from metasd_bandits.policies.kl_ucb import kl_bernoulli_upper
from metasd_bandits.policies.sh import halving

SEEDS = st.integers(0, 2**31)
RUNS = st.tuples(st.integers(1, 6), st.integers(1, 120), SEEDS)


def run(policy, K, rewards, seed):
    policy.reset(K, seed=seed)
    arms = []
    for row in rewards:
        arms.append(policy.select())
        policy.update(arms[-1], row[arms[-1]])
    return arms


def drawn(K, rounds, seed):
    return np.random.default_rng(seed).integers(0, 6, (rounds, K)) / 5.0


@given(RUNS, st.floats(0.05, 2.0))
def test_a_window_no_shorter_than_the_run_is_ucb(case, beta):
    K, rounds, seed = case
    rewards = drawn(K, rounds, seed)
    window = make_policy("sw-ucb", window=max(rounds, K), beta=beta)
    assert run(window, K, rewards, seed) == run(make_policy("ucb", beta=beta), K, rewards, seed)


@given(RUNS, st.floats(0.05, 2.0))
def test_without_discount_d_ucb_is_ucb(case, beta):
    K, rounds, seed = case
    rewards = drawn(K, rounds, seed)
    undiscounted = make_policy("d-ucb", gamma=1.0, beta=beta)
    assert run(undiscounted, K, rewards, seed) == run(
        make_policy("ucb", beta=beta), K, rewards, seed
    )


@given(st.integers(2, 6), SEEDS)
@settings(max_examples=30)
def test_d_ucb_tends_to_ucb_as_the_discount_goes_to_one(K, seed):
    rng = np.random.default_rng(seed)
    near, ucb = make_policy("d-ucb", gamma=1.0 - 1e-9), make_policy("ucb", beta=1.0)
    near.reset(K, seed=0)
    ucb.reset(K, seed=0)
    for _ in range(100):
        arm, reward = int(rng.integers(K)), float(rng.random())
        near.update(arm, reward)
        ucb.update(arm, reward)
    near.select()
    ucb.select()
    np.testing.assert_allclose(near._views.score, ucb._views.score, rtol=1e-5)


@given(st.integers(1, 40), st.integers(0, 3000))
def test_halving_never_overspends(K, extra):
    phases = (K - 1).bit_length()
    budget = K * phases + extra
    spent, alive, done = 0, K, 0
    for target, kept in halving(K, budget):
        assert target > done
        spent += alive * (target - done)
        assert kept == (alive + 1) // 2
        alive, done = kept, target
    assert spent <= budget
    assert alive == 1


@given(st.integers(2, 9), st.integers(0, 60), SEEDS)
@settings(max_examples=40)
def test_sh_never_explores_beyond_its_budget(K, extra, seed):
    budget = K * (K - 1).bit_length() + extra
    policy = make_policy("sh", budget=budget)
    arms = run(policy, K, drawn(K, budget + 10, seed), seed)
    assert len(set(arms[budget:])) == 1  # the survivor alone


@given(st.permutations(range(5)), SEEDS, st.sampled_from(["ucb", "kl-ucb", "exp3", "d-ucb", "sh"]))
@settings(max_examples=60)
def test_permuting_arms_permutes_probabilities(order, seed, name):
    rng = np.random.default_rng(seed)
    one, other = make_policy(name), make_policy(name)
    one.reset(5, seed=1)
    other.reset(5, seed=1)
    for _ in range(60):
        p, q = one.probabilities(), other.probabilities()
        np.testing.assert_allclose(p, q[list(order)], atol=1e-12)
        arm = int(rng.choice(5, p=p))
        reward = float(rng.integers(0, 3) / 2)
        one.select(np.arange(5) == arm)
        other.select(np.arange(5) == order[arm])
        one.update(arm, reward)
        other.update(order[arm], reward)


@given(RUNS, st.sampled_from(["ucb", "exp3", "sh", "sw-ucb", "cd-ucb", "ucb2", "ratio-ucb"]))
@settings(max_examples=60)
def test_what_is_kept_entirely_is_not_changed(case, name):
    """forget(1) leaves every mean; forget(0) leaves a fresh policy."""
    K, rounds, seed = case
    policy, fresh = make_policy(name), make_policy(name)
    run(policy, K, drawn(K, rounds, seed), seed)
    means = policy.means
    policy.forget(1.0)
    if not policy.restarts:
        np.testing.assert_array_equal(policy.means, means)
    policy.forget(0.0, seed=3)
    fresh.reset(K, seed=3)
    assert policy.state_dict() == fresh.state_dict()


@given(st.floats(0.0, 1.0), SEEDS)
@settings(max_examples=30)
def test_forgetting_scales_the_evidence(keep, seed):
    policy = make_policy("ucb")
    run(policy, 3, drawn(3, 50, seed), seed)
    before = policy._views.pulls.copy()
    policy.forget(keep)
    np.testing.assert_allclose(policy._views.pulls, keep * before)


@given(st.integers(1, 12), st.sampled_from([1, 2, 5, 10**9]), st.floats(0.1, 1.0), SEEDS)
def test_kl_ucb_leaves_out_no_arm_that_could_lead(K, grid, keep, seed):
    """Against the indices of all arms, after delayed, masked and half-forgotten rounds."""
    rng = np.random.default_rng(seed)
    policy = make_policy("kl-ucb")
    policy.reset(K, seed=0)
    for _ in range(rng.integers(0, 80)):
        arm = policy.select(np.arange(K) == rng.integers(K))
        if rng.random() < 0.9:
            policy.update(arm, float(np.rint(rng.random() * grid) / grid))
    if rng.random() < 0.3:
        policy.forget(keep)
    s, mask = policy._views, rng.random(K) < 0.8
    mask[rng.integers(K)] = True
    budget, trials = math.log(max(s.clock[0], 1.0)), s.pulls + s.pending
    indices = [
        kl_bernoulli_upper(m, budget / n) if n else math.inf
        for m, n in zip(s.mean, trials, strict=True)
    ]
    leads = mask & (np.array(indices) == max(np.array(indices)[mask]))
    np.testing.assert_array_equal(policy.probabilities(mask), leads / leads.sum())
