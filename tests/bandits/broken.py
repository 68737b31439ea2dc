"""Policies broken on purpose, one way each, for `check_policy` to find."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from metasd_bandits.policy import Policy


class Sound(Policy):
    """Epsilon-greedy in plain Python that keeps the whole contract; the broken ones derive."""

    name = "sound"

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed or 0)
        self.n = np.zeros(n_arms)
        self.total = np.zeros(n_arms)
        self.flying = np.zeros(n_arms)

    def probabilities(self, available: Any = None) -> np.ndarray:
        free = np.ones(self.n.size, bool) if available is None else np.array(available, bool)
        if not free.any():
            raise ValueError("no arm is available")
        tried = self.n + self.flying > 0
        mean = np.where(self.n > 0, self.total / np.maximum(self.n, 1), 1.0)
        score = np.where(free, np.where(tried, mean, math.inf), -math.inf)
        best = score == score.max()
        p = best / best.sum()
        return p if score.max() == math.inf else 0.9 * p + 0.1 * free / free.sum()

    def draw(self, p: np.ndarray) -> int:
        return int(min(np.searchsorted(np.cumsum(p), self.rng.random(), "right"), p.size - 1))

    def select(self, available: Any = None) -> int:
        arm = self.draw(self.probabilities(available))
        self.flying[arm] += 1
        return arm

    def check(self, arm, reward, cost, propensity, rewards) -> None:
        every = [reward] if rewards is None else [reward, *rewards]
        ok = all(0 <= r <= 1 for r in every) and 0 <= arm < self.n.size and 0 < cost < math.inf
        ok = ok and (rewards is None or len(rewards) == self.n.size)
        if not (ok and (math.isnan(propensity) or 0 < propensity <= 1)):
            raise ValueError("bad feedback")

    def update(self, arm, reward, *, cost=1.0, propensity=math.nan, rewards=None) -> None:
        self.check(arm, reward, cost, propensity, rewards)
        self.flying[arm] = max(self.flying[arm] - 1, 0)
        self.n[arm] += 1
        self.total[arm] += reward

    def state_dict(self) -> dict[str, Any]:
        arrays = {k: getattr(self, k).tolist() for k in ("n", "total", "flying")}
        return {"rng": self.rng.bit_generator.state, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in ("n", "total", "flying"):
            setattr(self, key, np.array(state[key]))
        self.rng = np.random.default_rng(0)
        self.rng.bit_generator.state = state["rng"]


class Minimal(Policy):
    """The three methods that a policy cannot do without; draws uniformly."""

    name = "minimal"
    check = Sound.check

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed or 0)
        self.n = np.zeros(n_arms)

    def select(self, available: Any = None) -> int:
        free = np.arange(self.n.size) if available is None else np.flatnonzero(available)
        if free.size == 0:
            raise ValueError("no arm is available")
        return int(self.rng.choice(free))

    def update(self, arm, reward, *, cost=1.0, propensity=math.nan, rewards=None) -> None:
        self.check(arm, reward, cost, propensity, rewards)
        self.n[arm] += 1


class LowestIndexWinsTies(Sound):
    def probabilities(self, available=None):
        p = super().probabilities(available)
        p[:] = np.arange(p.size) == p.argmax()
        return p


class ReadsTheGlobalGenerator(Sound):
    def draw(self, p):
        return int(np.random.choice(p.size, p=p / p.sum()))  # noqa: NPY002


class LearnsFromNan(Sound):
    def check(self, arm, reward, cost, propensity, rewards):
        if not math.isnan(reward):
            super().check(arm, reward, cost, propensity, rewards)


class LearnsBeforeItRefuses(Sound):
    def update(self, arm, reward, **round_):
        self.n[arm % self.n.size] += 1
        super().update(arm, reward, **round_)
        self.n[arm] -= 1


class IgnoresMasks(Sound):
    def select(self, available=None):
        super().select(available)
        return super().select()


class ClaimsUniform(Sound):
    def select(self, available=None):
        arm = self.draw(Sound.probabilities(self, available))
        self.flying[arm] += 1
        return arm

    def probabilities(self, available=None):
        free = np.ones(self.n.size) if available is None else np.array(available, float)
        return free / free.sum()


class SavesTheSeedNotTheStream(Sound):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.rng = np.random.default_rng(6)


class GivesItsStateAway(Sound):
    def state_dict(self):
        return {**super().state_dict(), "n": self.n}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if isinstance(state["n"], np.ndarray):
            self.n = state["n"]


class SavesArrays(Sound):
    def state_dict(self):
        return {**super().state_dict(), "n": self.n.copy()}


class RemembersEverything(Sound):
    def reset(self, n_arms, seed=None):
        super().reset(n_arms, seed)
        self.history: list[float] = []

    def update(self, arm, reward, **round_):
        super().update(arm, reward, **round_)
        self.history.append(reward)


class ResetKeepsTheRecord(Sound):
    def reset(self, n_arms, seed=None):
        kept = getattr(self, "total", np.zeros(0))
        super().reset(n_arms, seed)
        self.total = kept if kept.size == n_arms else self.total


class PrefersTheLastArm(Sound):
    def probabilities(self, available=None):
        p = super().probabilities(available)
        if self.n.sum() > 0 and p[-1] > 0:
            p = 0.5 * p
            p[-1] += 0.5
        return p


class SticksUntilARewardComes(Sound):
    def select(self, available=None):
        if available is None and self.flying.sum() > 0:
            self.flying[self.last] += 1
            return self.last
        self.last = super().select(available)
        return self.last


class LearnsManyUntilItRefuses(Sound):
    def update_many(self, arms, rewards, *, costs=None, propensities=None):
        costs = costs or [1.0] * len(arms)
        propensities = propensities or [math.nan] * len(arms)
        for arm, reward, cost, p in zip(arms, rewards, costs, propensities, strict=True):
            self.update(arm, reward, cost=cost, propensity=p)


class LearnsOneOfMany(Sound):
    def update_many(self, arms, rewards, **rounds):
        super().update_many(arms, rewards, **rounds)
        if len(arms) > 1:
            self.total[arms[:-1]] = 0.0
