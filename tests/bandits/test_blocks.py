"""Blocks against brute force, closed forms, and the policies they generalise."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_bandits import ConfigError, blocks, make_policy
from metasd_bandits.theory import bounds

chance = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 1.0]))


@st.composite
def trees(draw):
    n = draw(st.integers(0, 8))
    return [draw(st.integers(-1, i - 1)) for i in range(n)], [draw(chance) for _ in range(n)]


@given(trees(), st.integers(0, 9))
def test_no_closed_set_brings_more(tree, budget):
    parents, chances = tree
    kept = blocks.allocate(parents, chances, budget)
    w = blocks.path_chances(parents, chances)
    assert kept == sorted(set(kept))
    assert len(kept) <= budget
    assert all(parents[i] < 0 or parents[i] in kept for i in kept)
    best = max(
        sum(w[i] for i in s)
        for m in range(min(budget, len(w)) + 1)
        for s in itertools.combinations(range(len(w)), m)
        if all(parents[i] < 0 or parents[i] in s for i in s)
    )
    assert sum(w[i] for i in kept) == pytest.approx(best, abs=1e-12)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 2)), max_size=7))
def test_the_best_rate_is_that_of_the_best_subset(items):
    g, s = [x for x, _ in items], [x for _, x in items]
    subsets = itertools.product([0, 1], repeat=len(items))
    best = max((1 + np.dot(b, g)) / (1 + np.dot(b, s)) for b in subsets)
    chosen, rate = blocks.best_rate(g, s)
    assert rate == pytest.approx(best)
    assert rate == pytest.approx((1 + sum(g[i] for i in chosen)) / (1 + sum(s[i] for i in chosen)))


@given(st.lists(st.booleans(), max_size=30), st.floats(0.5, 1.0), st.floats(0.0, 5.0))
def test_counts_are_the_discounted_beta_posterior(outcomes, discount, strength):
    c = blocks.Calibrator(["a", "b"], mean=0.3, strength=strength, discount=discount)
    for x in outcomes:
        c.observe([0], [x])
    weight = discount ** np.arange(len(outcomes))[::-1]
    n = strength + weight.sum()
    expected = (0.3 * strength + weight @ np.array(outcomes, float)) / n if n > 0 else 0.3
    assert c.chance([0, 1]).tolist() == pytest.approx([expected, 0.3])


def test_a_state_and_a_prior_round_trip(tmp_path):
    c = blocks.Calibrator(["a", "b"], bonus=1.0)
    c.observe([0, 1, 0], [True, False, True])
    d = blocks.Calibrator(["a", "b"], bonus=1.0)
    d.load_state_dict(c.state_dict())
    assert (d.chance([0, 1]) == c.chance([0, 1])).all()
    blocks.save_prior(c.prior(), tmp_path / "p.json")
    known = blocks.read_prior(tmp_path / "p.json")
    plain = blocks.Calibrator(["b", "a"], prior=known)
    assert plain.chance([0, 1]).tolist() == pytest.approx([0.5 * 2 / 3, 3 / 4])
    with pytest.raises(ConfigError, match="keys"):
        c.chance([2])


@pytest.mark.parametrize("name", ["ucb", "thompson", "exp3"])
def test_one_arm_decides_as_its_policy_does(name):
    K, N = 3, 4
    plain, sets = make_policy(name), blocks.OneArm(make_policy(name), K)
    plain.reset(K, 5)
    sets.begin(5)
    rng = np.random.default_rng(0)
    parents = [-1 if j == 0 else K * (j - 1) + i for j in range(N) for i in range(K)]
    owners = [(i,) for _ in range(N) for i in range(K)]
    candidates = blocks.Candidates(parents, owners, [0] * (K * N))
    for _ in range(200):
        accepted = rng.integers(0, N + 1, K)
        stood = [bool(j < accepted[i]) for j in range(N) for i in range(K)]
        arm = plain.select()
        kept = sets.select(candidates, N)
        assert kept == [K * j + arm for j in range(N)]
        plain.update(arm, accepted[arm] / N)
        sets.update(candidates, kept, stood)


offers = st.lists(st.lists(st.floats(0.0, 1.0), max_size=3), max_size=4)


@given(st.lists(st.floats(0.0, 1.0), max_size=4), offers, st.integers(0, 5), st.floats(0.0, 2.0))
def test_each_drafter_asked_pays_and_no_single_one_is_better_than_the_set(held, offered, m, rate):
    times = [0.1 * (i + 1) for i in range(len(offered))]
    asked = blocks.whom_to_ask(held, offered, times, m, rate)

    def net(who):
        more = [w for i in who for w in offered[i]]
        return blocks.marginal_gain(held, more, m) - rate * sum(times[i] for i in who)

    nets = [net(asked[:n]) for n in range(len(asked) + 1)]
    assert all(a < b + 1e-12 for a, b in itertools.pairwise(nets))
    alone = [net([i]) for i in range(len(offered))]
    assert nets[-1] >= max([0.0, *alone]) - 1e-9
    if len(offered) == 1:
        assert (asked == [0]) == (alone[0] > 0.0)
    assert all(net([*asked, i]) <= nets[-1] + 1e-9 for i in range(len(offered)) if i not in asked)


@given(st.lists(st.floats(0.0, 1.0), max_size=7), st.floats(0.0, 0.5), st.floats(0.0, 4.0))
def test_no_other_length_of_a_chain_is_worth_more(chances, seconds, rate):
    worth = np.concatenate([[0.0], np.cumsum(np.cumprod(chances) - rate * seconds)])
    assert worth[blocks.draft_length(chances, seconds, rate)] >= worth.max() - 1e-9


rounds_seen = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 2.0)), max_size=20)


@given(rounds_seen, st.floats(0.5, 1.0))
def test_a_rate_is_the_ratio_of_faded_sums(rounds, keep):
    rate = blocks.Rate(start=2.0, keep=keep, strength=3.0)
    for tokens, seconds in rounds:
        rate.observe(tokens, seconds)
    ages = keep ** np.arange(len(rounds) + 1)[::-1]
    sums = ages @ np.array([(3.0, 1.5), *rounds])
    assert rate.value == pytest.approx(sums[0] / sums[1])
    again = blocks.Rate(start=1.0, keep=keep)
    again.load_state_dict(rate.state_dict())
    assert again.value == rate.value


def test_block_ucb_tries_both_roots_and_ends_with_the_best_block():
    candidates = blocks.Candidates([-1, -1, 0, 1], [[0], [1], [0], [1]], [0, 1, 2, 3])
    policy = blocks.BlockUCB(blocks.Calibrator("abcd", strength=0.0, bonus=3.0))
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(1500):
        kept = policy.select(candidates, 2)
        first = rng.random() < 0.3
        second = rng.random() < 0.8
        stood = [first, not first, first and second, not first and second]
        policy.update(candidates, kept, [x if i in kept else None for i, x in enumerate(stood)])
        chosen.append(kept)
    assert {0, 1, 3} <= {i for kept in chosen for i in kept}
    assert chosen[-300:].count([1, 3]) > 270
    again = blocks.BlockUCB(blocks.Calibrator("abcd", strength=0.0, bonus=3.0))
    again.load_state_dict(policy.state_dict())
    assert again.select(candidates, 2) == policy.select(candidates, 2)


def test_a_new_query_keeps_as_much_as_it_is_told():
    candidates = blocks.Candidates([-1], [[0]], [0])
    policy = blocks.BlockUCB(blocks.Calibrator("a", mean=0.5, strength=1.0), keep=0.5)
    for _ in range(4):
        policy.update(candidates, [0], [True])
    policy.begin()
    assert policy.calibrator.chance([0])[0] == pytest.approx((0.5 + 2.0) / 3.0)


def test_the_cascade_bound_says_something_when_the_page_says_so():
    def bound(T, gap=0.0):
        return bounds.cascade_upper(8, 5, T, depth=5, gap=gap)

    assert bound(9_000) == 5 * 9_000
    assert bound(9_200) < 5 * 9_200
    assert bound(10**8, 0.05) == bound(10**8)
    assert bound(10**9, 0.05) < bound(10**9)
    with pytest.raises(ConfigError, match="bonus"):
        bounds.cascade_upper(2, 1, 10, depth=1, bonus=2.0)
