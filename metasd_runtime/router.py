"""The adapter: a policy, a reward and a pool of drafters; where bandits and models meet."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import time
import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import Decision, Policy, Round, checks, make_policy, make_reward
from metasd_runtime.draft import Drafter
from metasd_runtime.drafters.none import NoDraft

__all__ = ["Router", "Scope", "twin"]

Scope = Literal["query", "carried"]


class Router:
    """Which drafter drafts next, and what was learned from it.

    Parameters
    ----------
    drafters : sequence of Drafter
        The pool. "No draft" competes as an arm under the throughput reward; under the others,
        which it would score 0 by definition, it is only where decoding falls back when every
        drafter is disabled.
    policy : str or Policy
    reward : str
        ``throughput``, ``bd``, ``be``, or another name that `make_reward` knows.
    draft_length : int
        N, the most tokens of a block.
    scope : {"query", "carried"}
        Reset the policy for each query (the paper's choice), or carry what was learned over.

    Attributes
    ----------
    arms : tuple of str
        Names of the arms; the last is "none" where it does not compete.
    disabled : dict of int to str
        Arms that cannot be used in the present query, and why.
    bandit_seconds : float
        Time spent selecting and updating in the present query.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: str | Policy = "ucb",
        reward: str = "throughput",
        draft_length: int = 5,
        scope: Scope = "query",
    ) -> None:
        self.draft_length = checks.integer("draft_length", draft_length, 1)
        self.scope = checks.choice("scope", scope, ("query", "carried"))
        self.policy = make_policy(policy)
        self.reward_name = reward
        self.reward = make_reward(reward)
        names = [drafter.name for drafter in drafters]
        for name in names:
            if names.count(name) > 1:
                raise checks.ConfigError(f"two drafters are called {name!r}; names must differ")
        competing = [d for d in drafters if d.name != "none" or reward == "throughput"]
        self.drafters: list[Drafter] = list(competing)
        self.n_competing = len(competing)
        if "none" not in [d.name for d in competing]:
            self.drafters.append(NoDraft())
        self.arms = tuple(drafter.name for drafter in self.drafters)
        self.fallback = self.arms.index("none")
        self.needs_features = any(drafter.needs_features for drafter in self.drafters)
        self.disabled: dict[int, str] = {}
        self.bandit_seconds = 0.0
        self._started = False

    def start(self, tokens: Sequence[int], seed: int) -> None:
        """A query begins: every drafter is welcome again, and the policy forgets if it should."""
        self.disabled = {}
        self.bandit_seconds = 0.0
        if self.n_competing and (self.scope == "query" or not self._started):
            self.policy.reset(self.n_competing, seed=seed)
        self._started = True
        for arm, drafter in enumerate(self.drafters):
            try:
                drafter.start(tokens)
            except Exception as error:
                self.disable(arm, error)

    def share(self, seed: int) -> Policy:
        """A policy that the rows of a batch learn together, ready for them.

        The router's own where it is carried across queries; else another of its kind, so that
        calls in between leave it alone.
        """
        policy = self.policy if self.scope == "carried" else twin(self.policy)
        if self.n_competing and (self.scope == "query" or not self._started):
            policy.reset(self.n_competing, seed=seed)
        self._started = True
        return policy

    def for_row(self, drafters: Sequence[Drafter], shared: Policy | None = None) -> Router:
        """The same arms over one row's own drafters.

        Parameters
        ----------
        shared : Policy, optional
            A policy that all rows learn together, which no row's beginning resets. Without it
            the row has one of its own.
        """
        row = copy.copy(self)
        row.drafters, row.disabled = list(drafters), {}
        row.policy = twin(self.policy) if shared is None else shared
        if shared is not None:
            row.scope, row._started = "carried", True
        return row

    def disable(self, arm: int, error: Exception) -> None:
        """Leave an arm out for the rest of the query, with a warning; decoding goes on."""
        reason = f"{type(error).__name__}: {error}"
        self.disabled[arm] = reason
        warnings.warn(
            f"drafter {self.arms[arm]!r} is disabled for this query ({reason}); "
            "decoding goes on without it, its output unchanged",
            RuntimeWarning,
            stacklevel=2,
        )

    def select(self) -> Decision:
        """Choose an arm among those that are not disabled."""
        begin = time.perf_counter()
        if len(self.disabled.keys() - {self.n_competing}) >= self.n_competing:
            return Decision(self.fallback, 1.0)
        decision = self._usable(self.policy.decide(self._available()))
        self.bandit_seconds += time.perf_counter() - begin
        return decision

    def _usable(self, decision: Decision) -> Decision:
        """The decision with a plain int for its arm, or "no draft" if the policy missed the mask.

        Raises
        ------
        ValueError
            If the policy chose what is no arm at all.
        """
        if not hasattr(decision.arm, "__index__") or not 0 <= decision.arm < self.n_competing:
            raise ValueError(
                f"policy {self.policy.name!r} selected arm {decision.arm!r}; "
                f"select() must return an integer in [0, {self.n_competing})"
            )
        if decision.arm in self.disabled:
            return Decision(self.fallback, math.nan)
        return Decision(operator.index(decision.arm), decision.propensity)

    def update(self, round_: Round) -> None:
        """Let the policy learn from a round (not from one that fell back to no draft)."""
        if round_.arm >= self.n_competing or round_.arm in self.disabled:
            return
        begin = time.perf_counter()
        self.policy.update(
            round_.arm,
            round_.reward,
            cost=round_.step,
            propensity=round_.propensity,
            rewards=round_.rewards,
        )
        self.bandit_seconds += time.perf_counter() - begin

    def commit(self, tokens: Sequence[int], features: object = None) -> None:
        """Tell every drafter what stands now."""
        for arm, drafter in enumerate(self.drafters):
            if arm in self.disabled:
                continue
            try:
                drafter.commit(tokens, features)  # type: ignore[arg-type]
            except Exception as error:
                self.disable(arm, error)

    def _available(self) -> NDArray[np.bool_] | None:
        if not self.disabled:
            return None
        return np.array([arm not in self.disabled for arm in range(self.n_competing)])


def twin(policy: Policy) -> Policy:
    """Another policy of the same kind and hyperparameters; reset it before use."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return dataclasses.replace(policy)
    return copy.deepcopy(policy)
