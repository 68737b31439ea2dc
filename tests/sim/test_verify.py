"""Every line of ``metasd-sim verify`` can fail, and does where what it tests is broken."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
import sim_mutants
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from metasd_bandits import registry
from metasd_bandits.registry import POLICIES
from metasd_bandits.theory import acceptance, bounds
from sim.acceptance import IID, Clustered, Language, Recorded
from sim.arms import against_ucb, misleading
from sim.cli import app
from sim.schedules import Stationary
from sim.simulate import simulate_bandit
from sim.studies import verify
from sim.studies.verify import CLAIMS, Check, Setting

# So many replications that a line which holds says so; more where noise is larger.
FAST = 12
REPLICATIONS = {
    "rewards/mean-be": 70,
    "rewards/variance-be": 150,
    "rewards/mean-bd": 80,
    "rewards/variance-bd": 60,
    "adversarial/exp3": 16,
    "decomposition": 60,
    "growth/ln-b": 30,
    "growth/kl-ucb-1": 200,
    "growth/kl-ucb-5": 100,
    "non-stationary": 16,
    "objections/even-prefixes": 80,
    "objections/uneven-prefixes": 80,
    "objections/random-length": 60,
    "objections/wrong-arm": 40,
}


def line(name: str) -> str:
    """The verdict's first word, simulated fast."""
    claim = CLAIMS[name](Setting(REPLICATIONS.get(name, FAST)))
    return claim.verdict.partition(":")[0]


def policy(name: str, wrong: str | type):
    """The policy called `name` decides as another one."""
    cls = POLICIES[wrong] if isinstance(wrong, str) else wrong

    def make(**hyperparameters):
        known = registry._hyperparameters(cls)
        return cls(**{k: v for k, v in hyperparameters.items() if k in known})

    def install(patch: pytest.MonkeyPatch) -> None:
        fields = [f.name for f in dataclasses.fields(POLICIES[name])]
        right = registry._hyperparameters
        patch.setitem(registry.POLICIES, name, make)
        patch.setattr(registry, "_hyperparameters", lambda c: fields if c is make else right(c))

    return install


def replaced(owner: object, name: str, wrong: object):
    """One function of a module or class is another one."""
    return lambda patch: patch.setattr(owner, name, wrong)


def changed(owner: object, name: str, wrong):
    """``wrong(right)`` in the place of a function."""
    return lambda patch: patch.setattr(owner, name, wrong(getattr(owner, name)))


def kernel(model: type, wrong):
    return replaced(model, "draft", staticmethod(wrong))


def scaled_moments(right):
    return lambda self: right(self) | {"bd_var": 10.0 * right(self)["bd_var"]}


def same_contexts(right):
    return lambda *a, **options: right(*a, **options | {"unevenness": 0.0})


def never_lumpy(right):
    return lambda *a, **options: right(*a, **options | {"cluster": 0.0})


def half_clustered(right):
    return lambda *a, **options: right(*a, **options | {"cluster": 0.5})


def inverted(right):
    return lambda low, high: 1.0 / right(low, high)


def scaled(right):
    return lambda low, high: 0.1 * right(low, high)


def times(factor: float):
    return lambda right: lambda *a, **options: factor * np.asarray(right(*a, **options))


def without_bonus(right):
    return lambda *a: right(*a) - 1.0


def exchanged(right):
    """BD's bound with BE's gaps, and the other way round."""
    return lambda *a, reward, **rest: right(*a, reward={"be": "bd", "bd": "be"}[reward], **rest)


def untruncated(alpha, draft_length):
    return alpha / (1.0 - alpha)


def second_moment(alpha, draft_length):
    return acceptance.mean_accepted(alpha, draft_length) * draft_length


ratio_inverted = changed(verify, "signal_ratio", inverted)
bd_scaled = changed(verify, "signal_ratio", scaled)
MUTANTS = [
    ("rewards/mean-be", "no truncation", replaced(acceptance, "mean_accepted", untruncated)),
    ("rewards/mean-be", "one draft more", kernel(IID, sim_mutants.one_draft_more)),
    (
        "rewards/variance-be",
        "mean for variance",
        replaced(acceptance, "var_accepted", second_moment),
    ),
    ("rewards/mean-bd", "BD scaled by .1", kernel(Clustered, sim_mutants.tenth_of_bd)),
    ("rewards/mean-bd", "BE for BD", kernel(Clustered, sim_mutants.be_for_bd)),
    (
        "rewards/variance-bd",
        "positions move together",
        changed(verify, "Clustered", half_clustered),
    ),
    ("feedback-signal/every-pair", "inverted", ratio_inverted),
    ("feedback-signal/every-pair", "BD scaled by .1", bd_scaled),
    ("feedback-signal/every-pair", "BE for BD", kernel(Clustered, sim_mutants.be_for_bd)),
    ("feedback-signal/coins", "inverted", ratio_inverted),
    ("feedback-signal/coins", "BD scaled by .1", bd_scaled),
    ("feedback-signal/coins", "variance formula", changed(Clustered, "moments", scaled_moments)),
    ("feedback-signal/table-2", "inverted", ratio_inverted),
    ("feedback-signal/table-2", "BD scaled by .1", bd_scaled),
    ("feedback-signal/correlated", "inverted", ratio_inverted),
    ("feedback-signal/correlated", "BD scaled by .1", bd_scaled),
    ("feedback-signal/all-or-nothing", "BD scaled by .1", bd_scaled),
    ("feedback-signal/all-or-nothing", "independent", changed(verify, "Clustered", never_lumpy)),
    (
        "decomposition",
        "g of one token less",
        changed(acceptance, "tokens_per_round", without_bonus),
    ),
    ("decomposition", "comparator", changed(verify, "expected_rounds", times(0.9))),
    ("decomposition", "one draft more", kernel(IID, sim_mutants.one_draft_more)),
    ("growth/ln-b", "explores for ever", policy("ucb", "epsilon-greedy")),
    ("growth/upper-bound", "never learns", policy("ucb", "uniform")),
    ("growth/upper-bound", "constant 1 for 8", changed(bounds, "metasd_ucb_upper", times(1 / 8))),
    ("growth/upper-bound-bd", "never learns", policy("ucb", "uniform")),
    ("growth/upper-bound-bd", "exchanged", changed(bounds, "metasd_ucb_upper", exchanged)),
    ("growth/kl-ucb-1", "UCB1's index", policy("kl-ucb", "ucb")),
    ("growth/kl-ucb-1", "lower bound", changed(bounds, "lower_bound", times(2.0))),
    ("growth/kl-ucb-5", "never learns", policy("kl-ucb", "uniform")),
    ("growth/kl-ucb-5", "lower bound", changed(bounds, "lower_bound", times(2.0))),
    ("adversarial/exp3", "negated", policy("exp3", sim_mutants.NegatedEXP3)),
    ("adversarial/exp3", "unweighted", policy("exp3", sim_mutants.UnweightedEXP3)),
    ("adversarial/exp3", "never learns", policy("exp3", sim_mutants.ForgetfulEXP3)),
    ("adversarial/exp3", "bound", changed(bounds, "exp3_upper", times(-1.0))),
    ("adversarial/ucb", "never learns", policy("ucb", "uniform")),
    (
        "non-stationary",
        "nothing changes",
        replaced(verify, "Piecewise", lambda *a: Stationary()),
    ),
    ("objections/even-prefixes", "whole L1", kernel(Language, sim_mutants.whole_l1_distance)),
    ("objections/uneven-prefixes", "contexts alike", changed(verify, "Language", same_contexts)),
    ("objections/random-length", "never learns", policy("ucb", "uniform")),
    ("objections/wrong-arm", "BE for BD", kernel(Recorded, sim_mutants.rewards_exchanged)),
]


def test_every_line_has_a_mutant() -> None:
    assert {name for name, _, _ in MUTANTS} == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_line_holds(name: str) -> None:
    assert line(name) == "holds"


@pytest.mark.parametrize(
    ("name", "install"), [pytest.param(n, i, id=f"{n}: {what}") for n, what, i in MUTANTS]
)
def test_a_line_fails_where_what_it_tests_is_wrong(name: str, install, monkeypatch) -> None:
    install(monkeypatch)
    assert line(name) == "fails"


@pytest.mark.parametrize("replications", [1, 2, 5])
def test_few_replications_leave_lines_undecided_and_none_fails(replications: int) -> None:
    report = verify.verify(replications=replications, seed=replications)
    verdicts = [row["verdict"] for row in report.rows]
    assert report.passed
    assert not any(verdict == "fails" for verdict in verdicts)
    assert any(verdict.startswith("undecided") for verdict in verdicts)


def test_an_undecided_line_says_how_many_replications_decide_it() -> None:
    out = CliRunner().invoke(
        app, ["verify", "--only", "decomposition", "--replications", "10", "--json"]
    )
    assert out.exit_code == 0, out.output
    said = json.loads(out.stdout)["rows"][0]["verdict"]
    assert said.startswith("undecided: about ")
    enough = 2 * int(said.split()[2])
    assert CLAIMS["decomposition"](Setting(enough)).verdict == "holds"


def test_a_line_that_fails_is_exit_status_1(monkeypatch) -> None:
    ratio_inverted(monkeypatch)
    out = CliRunner().invoke(app, ["verify", "--only", "feedback-signal/coins"])
    assert out.exit_code == 1
    assert "fails" in out.output


numbers = st.floats(-100, 100).filter(lambda x: x == 0 or abs(x) > 1e-6)


@given(mean=numbers, spread=st.floats(1e-3, 10), threshold=numbers, count=st.integers(2, 1000))
def test_the_verdict_is_where_the_interval_lies(mean, spread, threshold, count) -> None:
    values = mean + spread * np.linspace(-1, 1, count)
    above, below = Check(values, least=threshold), Check(values, most=threshold)
    x = above.interval()
    expected = "holds" if x.low > threshold else "fails" if x.high <= threshold else "undecided"
    assert above.verdict() == expected
    opposite = {"holds": "fails", "fails": "holds", "undecided": "undecided"}
    assert x.high == threshold or below.verdict() == opposite[expected]


def test_equality_needs_a_narrow_interval_and_fails_by_a_clear_one() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 1.0, 10_000)
    check = partial(Check, values)
    assert check(1.0, 1.0, 0.1).verdict() == "holds"
    assert check(1.0, 1.0, 0.001).verdict() == "undecided"
    assert check(1.2, 1.2, 0.5).verdict() == "fails"
    assert 1.0 < check(1.0, 1.0, 0.04).needed() < 10.0
    assert check(1.0, 1.0, 0.04).needed() < check(1.0, 1.0, 0.03).needed()


def test_uniform_play_earns_no_more_than_its_share_of_what_misleads() -> None:
    table = misleading(4, 1600)
    assert table.rewards.sum(0).tolist() == [100.0, 1500.0, 0.0, 0.0]
    runs = simulate_bandit(table, "uniform", horizon=1600, replications=200)
    assert runs.reward.mean() == pytest.approx(400.0, abs=6.0)


@pytest.mark.parametrize(("K", "T"), [(2, 50), (3, 500), (5, 2000)])
def test_ucb_loses_at_least_what_the_pigeonholes_say(K: int, T: int) -> None:
    table = against_ucb(K, T)
    reward = simulate_bandit(table, "ucb:beta=1", horizon=T, replications=2).reward
    lost = table.rewards.sum(0).max() - reward
    assert (lost >= (1 - 1 / K) * (T - K) - 1e-9).all()
    assert math.isclose(lost[0], lost[1])
