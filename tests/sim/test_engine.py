"""The compiled loops: the same as interpreted, for any number of threads, on common numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sim_plugins import AllOrNothing, CompiledAllOrNothing, EveryOther, Wasteful

from metasd_bandits import make_policy
from metasd_bandits.checks import ConfigError
from sim import (
    IID,
    Adversarial,
    Bernoulli,
    Clustered,
    Costs,
    Drifting,
    EndOfText,
    Environment,
    InterpretedWarning,
    Language,
    MarkovSwitching,
    Piecewise,
    RewardTable,
    Stationary,
    against_ucb,
    simulate,
    simulate_bandit,
)
from sim.streams import replication_streams

ALPHAS = [[0.3, 0.6, 0.8], [0.8, 0.3, 0.6]]
COSTS = Costs(draft=[0.01, 0.02, 0.05], switch=0.2, catch_up=0.01, prompt=7)


class Interpreted:
    """Wrap a built-in policy so that the simulator cannot compile it."""

    def __new__(cls, policy: str):
        inner = make_policy(policy)

        class Wrapped(EveryOther):
            name = "wrapped"

            def reset(self, n_arms, seed=None):
                inner.reset(n_arms, seed)

            def select(self, available=None):
                return inner.select()

            def update(self, arm, reward, *, cost=1.0, propensity=float("nan"), rewards=None):
                inner.update(arm, reward, cost=cost)

            def __deepcopy__(self, memo):
                return self

        return Wrapped()


def same(a, b) -> None:
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)


@pytest.mark.parametrize("policy", ["ucb", "exp3", "thompson"])
@pytest.mark.parametrize("reward", ["be", "bd", "tokens", "throughput"])
@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (IID(ALPHAS, 4), Drifting([0, 10], [0, 1])),
        (Clustered(ALPHAS, 4, persistence=0.5, shared=0.5), MarkovSwitching(0.9)),
        (Language(ALPHAS, 4), Piecewise([0, 20], [0, 1], unit="tokens")),
    ],
    ids=["iid-drifting", "clustered-markov", "language-piecewise"],
)
def test_compiled_equals_interpreted_draw_for_draw(policy, reward, model, schedule) -> None:
    environment = Environment(model, EndOfText(60.0, 500), schedule, COSTS)
    options = {"reward": reward, "replications": 5, "seed": 3, "marks": [1, 10, 100]}
    compiled = simulate(environment, policy, **options)
    with pytest.warns(InterpretedWarning, match="njit"):
        interpreted = simulate(environment, Interpreted(policy), **options)
    same(compiled, interpreted)


def test_plain_bandit_compiled_equals_interpreted() -> None:
    for arms in (Bernoulli(ALPHAS), RewardTable(np.random.default_rng(0).random((7, 3)))):
        schedule = Adversarial([0, 1, 1]) if arms.n_domains == 2 else Stationary()
        options = {"horizon": 100, "schedule": schedule, "replications": 4, "marks": [5, 100]}
        compiled = simulate_bandit(arms, "ucb", **options)
        with pytest.warns(InterpretedWarning):
            interpreted = simulate_bandit(arms, Interpreted("ucb"), **options)
        same(compiled, interpreted)


def test_any_number_of_threads_and_any_split_give_the_same_numbers() -> None:
    environment = Environment(Clustered(ALPHAS, 5), 300, MarkovSwitching(0.9), COSTS)
    whole = simulate(environment, "ucb", replications=40, seed=5)
    same(whole, simulate(environment, "ucb", replications=40, seed=5, threads=2))
    halves = [simulate(environment, "ucb", replications=20, seed=5, first=f) for f in (0, 20)]
    np.testing.assert_array_equal(whole.steps, np.concatenate([h.steps for h in halves]))
    arms = Bernoulli(ALPHAS[0])
    one = simulate_bandit(arms, "ucb", horizon=50, replications=9, threads=1)
    same(one, simulate_bandit(arms, "ucb", horizon=50, replications=9, threads=3))


def test_replications_are_spawned_streams() -> None:
    streams = replication_streams(9, 2, 3)
    children = np.random.SeedSequence(9).spawn(5)[2:]
    for r, child in enumerate(children):
        np.testing.assert_array_equal(streams.world[r], child.generate_state(4, np.uint64))


def test_policies_meet_the_same_text() -> None:
    """Common random numbers: the difference of two policies has a smaller variance."""
    environment = Environment(Clustered([0.5, 0.6, 0.7], 5, persistence=0.9), EndOfText(200.0))
    a = simulate(environment, "ucb:beta=0.3", replications=500, seed=1)
    b = simulate(environment, "ucb:beta=0.4", replications=500, seed=1)
    other = simulate(environment, "ucb:beta=0.4", replications=500, seed=2)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert (a.rounds - b.rounds).std() < 0.2 * (a.rounds - other.rounds).std()


def test_counts_add_up() -> None:
    environment = Environment(IID(ALPHAS, 4), EndOfText(300.0), Drifting([0, 60], [0, 1]), COSTS)
    runs = simulate(environment, "uniform", replications=50, marks=[1, 50, 10_000])
    np.testing.assert_allclose(runs.pulls.sum((1, 2)), runs.rounds)
    block = 4 * np.array([0.01, 0.02, 0.05]) + 1.0
    expected = runs.pulls.sum(1) @ block + 0.2 * runs.switches + 0.01 * runs.owed
    np.testing.assert_allclose(runs.steps, expected)
    assert (runs.be <= runs.rounds).all()
    assert np.isnan(runs.curve_rounds[:, 2]).all()
    assert (runs.curve_rounds[:, 0] == 1).all()
    np.testing.assert_allclose(runs.curve_pulls[:, 0].sum(1), 1.0)
    np.testing.assert_allclose(runs.speedup, runs.tokens / runs.steps)


def test_costs_of_switching_by_hand() -> None:
    """Three arms in turn, one token a round: every drafter owes what the others wrote."""
    environment = Environment(IID([0.0, 0.0, 0.0], 2), 6, costs=COSTS)
    with pytest.warns(InterpretedWarning):
        runs = simulate(environment, EveryOther(), replications=1)
    # the first round is no switch; arm 1 owes 7 + 1, arm 2 owes 7 + 2, later each owes 2
    assert runs.switches[0] == 5
    assert runs.owed[0] == 8 + 9 + 2 + 2 + 2
    assert simulate(environment, "fixed", replications=1).switches[0] == 0


def test_one_drafter_and_one_token_blocks() -> None:
    runs = simulate(Environment(IID([0.5], 1), 1000), "ucb", replications=200)
    assert runs.pulls[:, 0, 0] == pytest.approx(runs.rounds)
    assert runs.tokens.sum() / runs.rounds.sum() == pytest.approx(1.5, rel=0.01)


def test_schedules_place_domains_where_they_say() -> None:
    certain = IID([[0.0], [1.0]], 1)  # one token a round in domain 0, two in domain 1

    def pulls(schedule, **options):
        runs = simulate(Environment(certain, 30, schedule), "fixed", replications=1, **options)
        return runs.pulls[0, :, 0].tolist()

    assert pulls(Stationary()) == [30, 0]
    assert pulls(Piecewise([0, 10], [0, 1])) == [10, 10]
    assert pulls(Piecewise([0, 10], [0, 1], unit="tokens")) == [10, 10]
    assert pulls(Piecewise([0, 4], [1, 0], period=8)) == [8, 11]
    assert pulls(Adversarial([0, 1])) == [10, 10]
    drift = simulate_bandit(
        Bernoulli([[0.0], [1.0]]), "fixed", horizon=10, schedule=Drifting([0, 10], [0, 1])
    )
    assert drift.pulls[0, :, 0] == pytest.approx([5.5, 4.5])


def test_markov_switching_stays_as_long_as_asked() -> None:
    arms, R = Bernoulli([[0.0], [1.0], [1.0]]), 200
    runs = simulate_bandit(
        arms, "fixed", horizon=5000, schedule=MarkovSwitching(0.8), replications=R
    )
    share = runs.pulls[:, :, 0].mean(0) / 5000
    assert share == pytest.approx([1 / 3] * 3, abs=0.006)
    # a two-state chain's sum has variance T p (1 - p) (1 + rho) / (1 - rho), rho = stay - leave
    rho = 0.8 - 0.1
    expected = 5000 * (1 / 3) * (2 / 3) * (1 + rho) / (1 - rho)
    assert runs.reward.var() == pytest.approx(expected, rel=0.25)


def test_the_adversary_starves_ucb() -> None:
    table = against_ucb(3, 3000)
    runs = simulate_bandit(table, "ucb:beta=1", horizon=3000, replications=5)
    assert (runs.reward < 2.0).all()  # only the K opening rounds pay
    assert table.rewards.sum(0).max() > 0.6 * 3000


def test_ucb1_regret_matches_the_known_monte_carlo_value() -> None:
    """p = (.3, .4, .5, .6, .7), T = 10,000: 229.31 +- .20."""
    arms = Bernoulli([0.3, 0.4, 0.5, 0.6, 0.7])
    runs = simulate_bandit(arms, "ucb:beta=1", horizon=10_000, replications=1000, seed=2)
    regret = runs.pulls[:, 0] @ np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    error = regret.std() / np.sqrt(1000)
    assert abs(regret.mean() - 229.31) < 4 * np.hypot(error, 0.20)


@pytest.mark.parametrize(
    ("horizon", "means", "expected"),
    [
        (20, (0.9, 0.6), 6.7251541104),
        (100, (0.9, 0.6), 22.5749490703),
        (100, (0.55, 0.45), 39.1987183664),
    ],
)
def test_ucb1_pulls_match_the_exact_dynamic_programme(horizon, means, expected) -> None:
    runs = simulate_bandit(
        Bernoulli(means), "ucb:beta=1", horizon=horizon, replications=40_000, seed=1
    )
    worse = runs.pulls[:, 0, 1]
    assert abs(worse.mean() - expected) < 4.5 * worse.std() / 200


def test_a_users_model_runs_compiled_and_interpreted_alike() -> None:
    compiled = simulate(Environment(CompiledAllOrNothing([0.2, 0.7]), 200), "ucb", replications=3)
    with pytest.warns(InterpretedWarning, match="'draft' is plain Python.*njit"):
        plain = simulate(Environment(AllOrNothing([0.2, 0.7]), 200), "ucb", replications=3)
    same(compiled, plain)
    assert (compiled.memories[:, 0] * 4 == np.rint(compiled.be * 4)).all()


def test_a_compiled_model_that_allocates_runs_too() -> None:
    lean = simulate(Environment(CompiledAllOrNothing([0.2, 0.7]), 200), "ucb", replications=3)
    wasteful = simulate(Environment(Wasteful([0.2, 0.7]), 200), "ucb", replications=3)
    np.testing.assert_array_equal(lean.steps, wasteful.steps)


def test_the_users_policy_object_is_left_alone() -> None:
    policy = make_policy("ucb")
    policy.reset(2, seed=1)
    before = policy.state_dict()
    simulate(Environment(IID([0.2, 0.7]), 50), policy, replications=2)
    assert policy.state_dict() == before


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IID([0.2, 1.2]), r"alphas=1\.2.*\[0, 1\]"),
        (lambda: IID([]), "no drafter"),
        (lambda: IID([[0.2, 0.3], [0.4]]), "rows of K numbers"),
        (lambda: IID([0.5], 0), "draft_length=0.*at least 1"),
        (lambda: IID([float("nan")]), "alphas=nan"),
        (lambda: Clustered([0.5], spread=1.5), "spread=1.5"),
        (lambda: Clustered([0.5], persistence=1.0), "persistence=1.0"),
        (lambda: Language([0.5], vocabulary=1), "vocabulary=1"),
        (lambda: Environment(IID([0.5]), 0), "tokens=0.*at least|tokens=0 is out of range"),
        (lambda: Environment(IID([0.5]), 10**15), "tokens=1000000000000000"),
        (lambda: EndOfText(float("inf")), "mean=inf"),
        (lambda: Environment(IID([0.5, 0.6]), 9, costs=Costs(switch=[1, 2, 3])), "2 drafters"),
        (lambda: Environment(IID([0.5]), 9, costs=Costs(verify=0.0)), "verify=0.0"),
        (lambda: Environment(IID([0.5]), 9, costs=Costs(draft=-1)), "draft=-1"),
        (lambda: Environment(IID([0.5]), 9, Piecewise([0, 5], [0, 1])), "domains=1"),
        (lambda: Environment(IID([0.5]), 9, Piecewise([0, 5], [0])), "2 positions for 1"),
        (lambda: Environment(IID([0.5]), 9, Piecewise([1], [0])), "begin with 0"),
        (lambda: Environment(IID([0.5]), 9, MarkovSwitching(1.5)), "stay=1.5"),
        (lambda: Environment(Language([[0.5], [0.6]]), 9, Drifting([0], [0])), "interpolated"),
        (lambda: simulate(Environment(IID([0.5]), 9), "ucbb"), "did you mean 'ucb'"),
        (lambda: simulate(Environment(IID([0.5]), 9), "fixed:arm=1"), "arm=1"),
        (lambda: simulate(Environment(IID([0.5]), 9), "ucb", replications=0), "replications=0"),
        (lambda: simulate(Environment(IID([0.5]), 9), "ucb", reward="b"), "unknown reward"),
        (lambda: simulate(Environment(IID([0.5]), 9), "ucb", marks=[3, 2]), "increase"),
        (lambda: simulate_bandit(Bernoulli([0.5]), "ucb", horizon=0), "horizon=0"),
        (lambda: Bernoulli([-0.1]), "means=-0.1"),
    ],
)
def test_bad_input_is_refused_with_value_and_range(build, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build()
