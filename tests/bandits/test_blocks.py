"""Blocks against brute force, closed forms, and the policies they generalise."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_bandits import ConfigError, blocks, make_policy

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
