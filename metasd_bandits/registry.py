"""Policies by name, with keyword hyperparameters: the same names in Python and on command lines."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from metasd_bandits import checks
from metasd_bandits.carried import Carried
from metasd_bandits.plugins import load_plugins
from metasd_bandits.policies.cd_ucb import ChangeDetectionUCB
from metasd_bandits.policies.d_ucb import DiscountedUCB
from metasd_bandits.policies.epsilon_greedy import EpsilonGreedy
from metasd_bandits.policies.etc import ExploreThenCommit
from metasd_bandits.policies.exp3 import EXP3
from metasd_bandits.policies.exp3_ix import EXP3IX
from metasd_bandits.policies.exp3s import EXP3S
from metasd_bandits.policies.exp3spec import EXP3Spec
from metasd_bandits.policies.fixed import Fixed
from metasd_bandits.policies.hedge import Hedge
from metasd_bandits.policies.kl_ucb import KLUCB
from metasd_bandits.policies.ratio_ucb import RatioUCB
from metasd_bandits.policies.round_robin import RoundRobin
from metasd_bandits.policies.sh import SequentialHalving
from metasd_bandits.policies.sw_ucb import SlidingWindowUCB
from metasd_bandits.policies.thompson import Thompson
from metasd_bandits.policies.ucb import UCB
from metasd_bandits.policies.ucb2 import UCB2
from metasd_bandits.policies.ucb_tuned import UCBTuned
from metasd_bandits.policies.ucb_v import UCBV
from metasd_bandits.policies.ucbspec import UCBSpec
from metasd_bandits.policies.uniform import Uniform
from metasd_bandits.policy import Policy

__all__ = ["POLICIES", "make_policy", "register_policy"]

_BUILT_IN: tuple[type[Policy], ...] = (
    ChangeDetectionUCB,
    DiscountedUCB,
    EpsilonGreedy,
    ExploreThenCommit,
    EXP3,
    EXP3IX,
    EXP3S,
    EXP3Spec,
    Fixed,
    Hedge,
    KLUCB,
    RatioUCB,
    RoundRobin,
    SequentialHalving,
    SlidingWindowUCB,
    Thompson,
    UCB,
    UCB2,
    UCBTuned,
    UCBV,
    UCBSpec,
    Uniform,
)
POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in _BUILT_IN}


def make_policy(policy: str | Policy, **hyperparameters: Any) -> Policy:
    """A policy from its name, ``"ucb"``, or its name with hyperparameters, ``"ucb:beta=0.5"``.

    Parameters
    ----------
    policy : str or Policy
        A `Policy` is returned as it is (hyperparameters are refused then).
    **hyperparameters
        Passed to the policy's class; those written behind the colon are parsed as numbers.
        Every name takes one more, ``carry``, in [0, 1]: the policy is then carried from query to
        query and keeps that share of its evidence (`metasd_bandits.carried.Carried`).

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the name or a hyperparameter is unknown (the near match is named), or a value out of
        range.

    Examples
    --------
    >>> make_policy("ucb", beta=0.5)
    UCB(beta=0.5)
    >>> make_policy("fixed:arm=1")
    Fixed(arm=1)
    >>> make_policy("ucb:carry=0.9")
    Carried(UCB(beta=0.1), keep=0.9)
    >>> make_policy("ucv")
    Traceback (most recent call last):
    metasd_bandits.checks.ConfigError: unknown policy 'ucv'; did you mean 'ucb'? Known: ...
    """
    if isinstance(policy, Policy):
        if hyperparameters:
            raise checks.ConfigError("hyperparameters go with a policy's name, not with an object")
        return policy
    name, _, written = policy.partition(":")
    if name not in POLICIES:
        load_plugins("metasd.policies", _register_entry)
    cls = POLICIES[checks.choice("policy", name, POLICIES)]
    given = {**_parse(written), **hyperparameters}
    carry = given.pop("carry", None)
    known = _hyperparameters(cls)
    for key in given:
        checks.choice(f"hyperparameter of {name!r}", key, known)
    made = cls(**given)
    return made if carry is None else Carried(made, carry)


def register_policy(cls: type[Policy]) -> type[Policy]:
    """Make a policy class known to `make_policy` and the command lines under its ``name``.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If it is no policy class, or has no name of its own.
    """
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise checks.ConfigError(
            f"{cls!r} is no policy; register a subclass of metasd_bandits.Policy"
        )
    if not cls.name or cls.name == Policy.name:
        raise checks.ConfigError(f"{cls.__name__} has no name; add name = 'my-policy' to the class")
    POLICIES[cls.name] = cls
    return cls


def _register_entry(name: str, cls: type[Policy]) -> None:
    register_policy(cls)


def _hyperparameters(cls: type[Policy]) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(inspect.signature(cls).parameters)


def _parse(written: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, written.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            raise checks.ConfigError(f"cannot read {item!r}; write hyperparameters as name=value")
        values[key.strip()] = _value(text.strip())
    return values


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
