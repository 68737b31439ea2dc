"""Whatever is given to a public validator, what it says stays short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metasd_bandits import checks, make_policy, make_reward
from metasd_bandits.carried import Carried
from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay.estimators import _check_weights
from metasd_bandits.round import Round
from metasd_bandits.theory import acceptance, bounds
from metasd_bandits.traces.synthetic import SyntheticLog
from sim.acceptance.iid import IID
from sim.costs import Costs

LONGEST = 400

EXTREME = st.one_of(
    st.floats(),
    st.sampled_from([1e300, -1e300, 1e-300, 5e-324, float("inf"), float("nan")]),
    st.integers(-(10**400), 10**400),
    st.sampled_from([10**400, -(10**400), 10**5000, -(10**5000), 2**63, True]),
    st.lists(st.floats(), max_size=300),
    st.text(max_size=300),
    st.just("9" * 5000),
)


def played() -> Any:
    policy = make_policy("ucb")
    policy.reset(2, seed=0)
    policy.select()
    return policy


def weights(x: Any) -> None:
    sums = np.full((50, 15), float(x))
    sums[:, 0] = 1.0  # of what is divided by, N; the spread is zero
    _check_weights(sums)


CALLS: dict[str, Callable[[Any], object]] = {
    "number": lambda x: checks.number("x", x, 0.0, 1.0),
    "integer": lambda x: checks.integer("x", x, 0, 9),
    "choice": lambda x: checks.choice("x", x, ["one", "other"]),
    "arms": lambda x: make_policy("ucb").reset(x),
    "seed": lambda x: make_policy("ucb").reset(2, seed=x) if x != 0 else None,
    "update's arm": lambda x: played().update(x, 0.5),
    "update's reward": lambda x: played().update(0, x),
    "update's cost": lambda x: played().update(0, 0.5, cost=x),
    "update's propensity": lambda x: played().update(0, 0.5, propensity=x),
    "keep": lambda x: Carried(make_policy("ucb"), keep=x),
    "hyperparameter": lambda x: make_policy(f"ucb:beta={checks.shown(x)}"),
    "alpha": lambda x: acceptance.mean_accepted(x, 3),
    "tokens per round": lambda x: acceptance.alpha_from_tokens(x, 3),
    "gaps": lambda x: bounds.metasd_ucb_pulls([x], 100),
    "bound": lambda x: bounds.exp3_upper(2, x),
    "rates": lambda x: IID([x]),
    "costs": lambda x: Costs(draft=x).table(2, 3),
    "log": lambda x: SyntheticLog([x], logger=[x]),
    "step": lambda x: make_reward("throughput")(
        Round("0", 0, 0, 1, 1, 2, 0.5, 0.5, 0.5, 0.5, step=x), 3
    ),
    "weights": weights,
}


@pytest.mark.parametrize("name", CALLS)
@settings(deadline=None, max_examples=60)
@given(x=EXTREME)
@example(10**400)
@example(10**5000)
@example(1e300)
@example(1e-300)
def test_a_message_is_short_whatever_was_given(name: str, x: Any) -> None:
    message = ""
    try:
        CALLS[name](x)
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        message = str(error)
    assert len(message) <= LONGEST


def test_a_number_beyond_every_float_is_out_of_range() -> None:
    for name, value in (("number", 10**400), ("number", -(10**5000)), ("update's cost", 10**400)):
        with pytest.raises(ValueError, match=r"outside the allowed range|not positive and finite"):
            CALLS[name](value)


@pytest.mark.parametrize("what", ["rewards", "costs", "propensities"])
def test_a_number_beyond_every_float_is_refused_among_many(what: str) -> None:
    policy, given = played(), {"rewards": [0.5, 0.5], "costs": None, "propensities": None}
    before = policy.state_dict()
    with pytest.raises(ValueError, match="beyond every float"):
        policy.update_many([0, 1], **{**given, what: [0.5, 10**400]})
    assert repr(policy.state_dict()) == repr(before)


def test_weights_that_are_all_alike_and_wrong_are_refused_shortly() -> None:
    with pytest.raises(ReplayError) as error:
        weights(3.0)
    assert len(str(error.value)) <= LONGEST


@given(st.floats() | st.integers() | st.text(max_size=60).filter(lambda t: len(repr(t)) <= 80))
def test_what_is_short_is_shown_as_it_is(value: Any) -> None:
    if len(repr(value)) <= 80:
        assert checks.shown(value) == repr(value)
    else:
        assert len(checks.shown(value)) <= 80
