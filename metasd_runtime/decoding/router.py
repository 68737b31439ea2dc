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
from torch import Tensor

from metasd_bandits import Decision, Policy, Round, checks, make_policy, make_reward
from metasd_bandits.carried import Carried
from metasd_runtime.decoding.drafter import Drafter, features_of
from metasd_runtime.decoding.in_use import Part
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.decoding.prompt_policy import PromptPolicy

__all__ = ["Router", "Scope", "check_names", "twin"]

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
        Reset the policy for each query (the paper's choice), or carry what was learned over,
        whole; `metasd_bandits.Carried` objects forget at a rate of their own.

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
        checks.choice("scope", scope, ("query", "carried"))
        self.scope: Scope = scope
        self.policy = make_policy(policy)
        if scope == "carried" and not isinstance(self.policy, Carried):
            self.policy = Carried(self.policy)
        self.reward_name = reward
        self.reward = make_reward(reward)
        check_names(drafters)
        competing = [d for d in drafters if d.name != "none" or reward == "throughput"]
        self.drafters: list[Drafter] = list(competing)
        self.n_competing = len(competing)
        if "none" not in [d.name for d in competing]:
            self.drafters.append(NoDraft())
        self.arms = tuple(drafter.name for drafter in self.drafters)
        self.fallback = self.arms.index("none")
        self._groups = _by_base(self.drafters)
        asked = {layer for base, _ in self._groups for layer in base.needs_features}
        self.needs_features = tuple(sorted(asked))
        self.disabled: dict[int, str] = {}
        self.bandit_seconds = 0.0
        self._begins = True

    def start(self, tokens: Sequence[int], seed: int, features: Tensor | None = None) -> None:
        """A query begins: every drafter is welcome again, and the policy forgets if it should.

        `features` are the prompt's, for the drafters that need them.
        """
        self.disabled = {}
        self.bandit_seconds = 0.0
        if self.n_competing and self._begins:
            self.policy.begin(self.n_competing, seed=seed)
            if reader := self._reader():
                reader.read(tokens, self.arms[: self.n_competing])
        for base, arms in self._groups:
            try:
                base.start(tokens)
                if base.needs_features:
                    base.commit(tokens, features_of(base, features, self.needs_features))
            except Exception as error:
                self._disable_all(arms, error)

    @property
    def bases(self) -> list[Drafter]:
        """The drafters with a state of their own; an arm uses one or more, and may share them."""
        return [base for base, _ in self._groups]

    @property
    def blocks(self) -> set[int]:
        """Sizes of the largest blocks to verify, of each drafter that an arm asks."""
        asked = [pair for arm in self.drafters for pair in arm.asked(self.draft_length)]
        return set().union(*(base.blocks(n) for base, n in asked))

    @property
    def policy_parts(self) -> list[Part]:
        """The policy's objects, one of which other sessions may have been given as well."""
        parts, policy = [self.policy], self.policy
        while isinstance(policy, Carried):
            policy = policy.policy
            parts.append(policy)
        return [Part(f"policy {one.name!r}", one) for one in parts]

    @property
    def drafter_parts(self) -> list[Part]:
        """The drafters with a state of their own."""
        held = {id(d): d for base in self.bases for d in (base, *base.parts)}
        return [Part(f"drafter {drafter.name!r}", drafter) for drafter in held.values()]

    @property
    def carries(self) -> bool:
        """Whether the policy keeps what it learns from query to query."""
        return isinstance(self.policy, Carried)

    def _reader(self) -> PromptPolicy | None:
        """The policy, if it is one that reads the prompt."""
        inner = self.policy.policy if isinstance(self.policy, Carried) else self.policy
        return inner if isinstance(inner, PromptPolicy) else None

    def share(self, seed: int) -> Policy:
        """A policy that the rows of a batch learn together, begun for them.

        The router's own where it is carried across queries; else another of its kind, so that
        calls in between leave it alone.

        Raises
        ------
        ConfigError
            For a policy that reads the prompt: it can be no more than one row's.
        """
        if self._reader():
            raise checks.ConfigError(
                f"policy {self.policy.name!r} reads the prompt, so rows cannot share it; "
                'decode with mode="heterogeneous" and scope="query"'
            )
        policy = self.policy if self.carries else twin(self.policy)
        if self.n_competing:
            policy.begin(self.n_competing, seed=seed)
        return policy

    def for_row(self, bases: Sequence[Drafter], shared: Policy | None = None) -> Router:
        """The same arms over one row's own state.

        Parameters
        ----------
        bases : sequence of Drafter
            Started, and told of commits, in place of this router's `bases`.
        shared : Policy, optional
            A policy that all rows learn together, which no row begins. Without it the row has
            one of its own.
        """
        row = copy.copy(self)
        row.disabled = {}
        row._groups = [(base, arms) for base, (_, arms) in zip(bases, self._groups, strict=True)]
        row.policy = twin(self.policy) if shared is None else shared
        row._begins = shared is None
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
                f"policy {self.policy.name!r} selected arm {checks.shown(decision.arm)}; "
                f"select() must return an integer in [0, {self.n_competing})"
            )
        if decision.arm in self.disabled:
            return Decision(self.fallback, math.nan)
        return Decision(operator.index(decision.arm), decision.propensity)

    def teaches(self, round_: Round) -> bool:
        """Whether a round says something of an arm: it fell back to no other, and broke nothing."""
        return round_.arm < self.n_competing and round_.arm not in self.disabled

    def update(self, round_: Round) -> None:
        """Let the policy learn from a round that teaches."""
        if not self.teaches(round_):
            return
        begin = time.perf_counter()
        self.policy.update(
            round_.arm,
            round_.reward,
            cost=round_.step,
            propensity=round_.propensity,
            rewards=self._every_reward(round_),
        )
        self.bandit_seconds += time.perf_counter() - begin

    def update_many(self, rounds: Sequence[Round]) -> None:
        """Let the policy learn from rounds that ended together, all of which teach."""
        begin = time.perf_counter()
        self.policy.update_many(
            [round_.arm for round_ in rounds],
            [round_.reward for round_ in rounds],
            costs=[round_.step for round_ in rounds],
            propensities=[round_.propensity for round_ in rounds],
        )
        self.bandit_seconds += time.perf_counter() - begin

    def _every_reward(self, round_: Round) -> list[float] | None:
        """The competing arms' rewards; one that could not serve (NaN) has earned nothing."""
        if round_.rewards is None:
            return None
        return [0.0 if math.isnan(r) else r for r in round_.rewards[: self.n_competing]]

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Tell every drafter what stands now."""
        for base, arms in self._groups:
            if self.disabled.keys() >= set(arms):
                continue
            try:
                base.commit(tokens, features_of(base, features, self.needs_features))
            except Exception as error:
                self._disable_all(arms, error)

    def _disable_all(self, arms: Sequence[int], error: Exception) -> None:
        for arm in arms:
            if arm not in self.disabled:
                self.disable(arm, error)

    def _available(self) -> NDArray[np.bool_] | None:
        if not self.disabled:
            return None
        return np.array([arm not in self.disabled for arm in range(self.n_competing)])


def check_names(drafters: Sequence[Drafter]) -> None:
    """Refuse drafters that have one name, or that of "no draft" (`ConfigError`)."""
    names = [drafter.name for drafter in drafters]
    for name in names:
        if names.count(name) > 1:
            raise checks.ConfigError(f"two drafters are called {name!r}; names must differ")
    if any(d.name == "none" and not isinstance(d, NoDraft) for d in drafters):
        raise checks.ConfigError("a drafter cannot be called 'none', which drafts nothing")


def twin(policy: Policy) -> Policy:
    """Another policy of the same kind and hyperparameters; reset it before use."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return dataclasses.replace(policy)
    return copy.deepcopy(policy)


def _by_base(drafters: Sequence[Drafter]) -> list[tuple[Drafter, list[int]]]:
    """Each drafter with a state of its own, and the arms that draft with it."""
    groups: dict[int, tuple[Drafter, list[int]]] = {}
    for arm, drafter in enumerate(drafters):
        for base in drafter.bases:
            groups.setdefault(id(base), (base, []))[1].append(arm)
    return list(groups.values())
