"""Who plays a policy over columns: the compiled engine, or Python for a user's own class."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.compiled import CompiledPolicy
from metasd_bandits.policy import Policy
from metasd_bandits.specialise import specialise
from metasd_bandits.stream import make_stream

__all__ = ["Player", "make_player"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Arms = NDArray[np.int64]


class Player(Protocol):
    """One policy with one seed, on its way through a trace."""

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        """Full replay of a batch: (n,) starts, (K, n) rewards, (K, n or 1) costs -> (n,) arms."""

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        """Rejection replay of a batch, all (n,): which logged rounds the policy took."""


def make_player(policy: Policy, n_arms: int, seed: int) -> Player:
    """The compiled engine where the policy has kernels, else the interpreter with a warning."""
    if isinstance(policy, CompiledPolicy):
        return _Compiled(policy, n_arms, seed)
    warnings.warn(
        f"policy {policy.name!r} is plain Python, so its replay is interpreted and perhaps a "
        "hundred times slower; derive it from metasd_bandits.compiled.CompiledPolicy, with "
        "select, update and probabilities under @njit, to compile it",
        stacklevel=3,
    )
    return _Interpreted(policy, n_arms, seed)


class _Compiled:
    def __init__(self, policy: CompiledPolicy, n_arms: int, seed: int) -> None:
        policy = copy.copy(policy)
        policy.reset(n_arms, seed)  # validates hyperparameters against K
        self._engine = _engine(type(policy))
        self._fresh = policy.fresh_buffer(n_arms)
        self._buffer = self._fresh.copy()
        self._stream = make_stream(seed)
        self._waiting = np.full(1, -1, dtype=np.int64)

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        arms = np.empty(len(starts), dtype=np.int64)
        rewards, costs = np.ascontiguousarray(rewards), np.ascontiguousarray(costs)
        masked = bool(np.isnan(rewards).any())
        self._engine.play(
            self._fresh, self._buffer, self._stream, starts, rewards, costs, masked, arms
        )
        return arms

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        taken = np.empty(len(starts), dtype=np.bool_)
        self._engine.match(
            self._fresh,
            self._buffer,
            self._stream,
            starts,
            logged,
            rewards,
            costs,
            keep,
            self._waiting,
            taken,
        )
        return taken


@cache
def _engine(policy_class: type[CompiledPolicy]) -> ModuleType:
    from metasd_bandits import replay_engine  # the template itself imports a policy

    return specialise(replay_engine, **policy_class.kernels())


class _Interpreted:
    def __init__(self, policy: Policy, n_arms: int, seed: int) -> None:
        self._policy: Any = copy.copy(policy)
        self._n_arms = n_arms
        self._policy.reset(n_arms, seed)
        self._waiting = -1

    def play(self, starts: Flags, rewards: Floats, costs: Floats) -> Arms:
        arms = np.empty(len(starts), dtype=np.int64)
        rows = rewards.T
        masked = np.any(np.isnan(rows), axis=1)
        timed = costs.shape[1] > 1
        for t in range(len(arms)):
            if starts[t]:
                self._policy.reset(self._n_arms)
            arm = self._policy.select(~np.isnan(rows[t]) if masked[t] else None)
            cost = float(costs[arm, t if timed else 0])
            self._policy.update(arm, float(rows[t, arm]), cost=cost, rewards=rows[t])
            arms[t] = arm
        return arms

    def match(
        self, starts: Flags, logged: Arms, rewards: Floats, costs: Floats, keep: Flags
    ) -> Flags:
        taken = np.zeros(len(starts), dtype=np.bool_)
        timed = len(costs) > 1
        for t in range(len(taken)):
            if starts[t]:
                self._policy.reset(self._n_arms)
                self._waiting = -1
            if self._waiting < 0:
                self._waiting = self._policy.select()
            if keep[t] and logged[t] == self._waiting:
                cost = float(costs[t if timed else 0])
                self._policy.update(self._waiting, float(rewards[t]), cost=cost)
                taken[t], self._waiting = True, -1
        return taken
