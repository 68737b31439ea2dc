"""Who plays a policy over columns: the compiled engine, or Python for a user's own class.

A query begins for a replayed policy as it begins for a live one: it is reset, or, where it is
`metasd_bandits.carried.Carried`, it forgets by that rule.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.carried import Carried
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.compiled.state import named_views
from metasd_bandits.intervals import ReplayError
from metasd_bandits.policy import Policy

__all__ = ["Player", "make_player"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Arms = NDArray[np.int64]


class Player(Protocol):
    """One policy with one seed, on its way through a trace."""

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        """Full replay of a batch: (n,) starts, (K, n) rewards, (K, n or 1) costs -> (n,) arms.

        `starts` marks the first round of each query.
        """

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        """Rejection replay of a batch, all (n,): which logged rounds the policy took."""


def make_player(policy: Policy, n_arms: int, seed: int) -> Player:
    """The compiled engine where the policy has kernels, else the interpreter with a warning."""
    inner = policy.policy if isinstance(policy, Carried) else policy
    if isinstance(inner, CompiledPolicy):
        return _Compiled(inner, policy.keep if isinstance(policy, Carried) else 0.0, n_arms, seed)
    if isinstance(policy, Carried) and type(inner).forget is Policy.forget:
        raise ReplayError(f"policy {inner.name!r} cannot be carried; implement forget()")
    warnings.warn(
        f"policy {inner.name!r} is plain Python, so its replay is interpreted and perhaps a "
        "hundred times slower; derive it from metasd_bandits.compiled.policy.CompiledPolicy and "
        "declare its kernels, to compile it",
        stacklevel=3,
    )
    return _Interpreted(policy, n_arms, seed)


class _Compiled:
    """The engine; a query begins inside it wherever that is a reset, or nothing at all."""

    def __init__(self, policy: CompiledPolicy, keep: float, n_arms: int, seed: int) -> None:
        self._policy = copy.deepcopy(policy)
        self._policy.reset(n_arms, seed)
        self._engine = _engine(type(policy))
        self._fresh = policy.fresh_buffer(n_arms)
        self._every = np.empty(n_arms) if "update_all" in policy.kernels() else None
        self._waiting = np.full(1, -1, dtype=np.int64)
        self._keep = 0.0 if policy.restarts else keep
        self._resets = self._keep == 0.0
        self._remembers = self._keep == 1.0 and policy.memory(n_arms) == 0

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        arms = np.empty(len(starts), dtype=np.int64)
        tables = (np.ascontiguousarray(rewards), np.ascontiguousarray(costs))
        masked = bool(np.isnan(rewards.min()))

        def run(first: int, last: int, resets: Flags) -> None:
            policy = self._policy
            state = (self._fresh, policy._buffer, policy._stream, first, last, resets)
            if self._every is None:
                self._engine.play(*state, *tables, masked, arms)
            else:
                self._engine.play_all(*state, *tables, masked, arms, self._every)

        self._by_query(starts, run, always=False)
        return arms

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        taken = np.empty(len(starts), dtype=np.bool_)

        def run(first: int, last: int, resets: Flags) -> None:
            policy = self._policy
            state = (self._fresh, policy._buffer, policy._stream, first, last, resets)
            self._engine.match(*state, logged, rewards, costs, keep, self._waiting, taken)

        self._by_query(starts, run, always=True)  # a query drops the decision that waits
        return taken

    def _by_query(
        self, starts: Flags, run: Callable[[int, int, Flags], None], always: bool
    ) -> None:
        """Run the rounds, stopping for the policy to forget where the engine cannot do it."""
        never = np.zeros_like(starts)
        if self._resets:
            run(0, len(starts), starts)
        elif self._remembers and not always:
            run(0, len(starts), never)
        else:
            first = 0
            for last in [*np.flatnonzero(starts).tolist(), len(starts)]:
                run(first, last, never)
                first = last
                if last < len(starts):
                    self._forget()

    def _forget(self) -> None:
        self._waiting[0] = -1
        if self._remembers:
            named_views(self._policy._buffer).pending[:] = 0.0
        else:
            self._policy.forget(self._keep)


@cache
def _engine(policy_class: type[CompiledPolicy]) -> ModuleType:
    from metasd_bandits.replay import engine_template

    return specialise(engine_template, **policy_class.kernels())


class _Interpreted:
    def __init__(self, policy: Policy, n_arms: int, seed: int) -> None:
        self._policy = copy.deepcopy(policy)
        self._n_arms = n_arms
        self._policy.begin(n_arms, seed)
        self._fresh, self._waiting = True, -1

    def _start(self) -> None:
        """A query begins; the first one has begun already, with the seed."""
        if not self._fresh:
            self._policy.begin(self._n_arms)
        self._fresh, self._waiting = False, -1

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        arms = np.empty(len(starts), dtype=np.int64)
        rows = rewards.T
        masked = np.any(np.isnan(rows), axis=1)
        timed = costs.shape[1] > 1
        for t in range(len(arms)):
            if starts[t]:
                self._start()
            usable = ~np.isnan(rows[t]) if masked[t] else None
            arm = self._policy.select(usable)
            cost = float(costs[arm, t if timed else 0])
            every = None if masked[t] else rows[t].copy()
            self._policy.update(arm, float(rows[t, arm]), cost=cost, rewards=every)
            arms[t] = arm
        return arms

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        taken = np.zeros(len(starts), dtype=np.bool_)
        timed = len(costs) > 1
        for t in range(len(taken)):
            if starts[t]:
                self._start()
            if self._waiting < 0:
                self._waiting = self._policy.select()
            if keep[t] and logged[t] == self._waiting:
                cost = float(costs[t if timed else 0])
                self._policy.update(self._waiting, float(rewards[t]), cost=cost)
                taken[t], self._waiting = True, -1
        return taken
