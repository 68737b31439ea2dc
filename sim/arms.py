"""Arms of a plain bandit: rewards without any decoding, for the theory's own setting."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from sim.acceptance.base import rates_by_domain

__all__ = ["Arms", "Bernoulli", "RewardTable", "against_ucb", "misleading"]


class Arms(ABC):
    """Where a plain bandit's rewards come from: `pay(model, arm, place, stream) -> reward`."""

    n_arms: int
    n_domains: int = 1
    drifts: ClassVar[bool] = False
    pay: ClassVar[Callable[..., Any]]

    @abstractmethod
    def parameters(self) -> Any:
        """What `pay` reads."""


class Means(NamedTuple):
    """Mean rewards (D, K)."""

    means: NDArray[np.float64]


@kernel
def pay_bernoulli(model, arm, place, stream):
    mean = model.means[place.domain, arm]
    if place.weight > 0.0:
        mean += place.weight * (model.means[place.to, arm] - mean)
    return 1.0 if uniform(stream) < mean else 0.0


@dataclass(frozen=True, eq=False)
class Bernoulli(Arms):
    """Arm i pays 1 with probability ``means[d, i]`` in domain d, else 0.

    Parameters
    ----------
    means : array_like, shape (K,) or (D, K)
        In [0, 1].
    """

    means: Any
    drifts = True
    pay = staticmethod(pay_bernoulli)

    def __post_init__(self) -> None:
        object.__setattr__(self, "means", rates_by_domain("means", self.means))
        object.__setattr__(self, "n_domains", self.means.shape[0])
        object.__setattr__(self, "n_arms", self.means.shape[1])

    def parameters(self) -> Means:
        return Means(self.means)


class Rewards(NamedTuple):
    """Rewards by round and arm (T, K)."""

    rewards: NDArray[np.float64]


@kernel
def pay_table(model, arm, place, stream):
    return model.rewards[place.t % model.rewards.shape[0], arm]


@dataclass(frozen=True, eq=False)
class RewardTable(Arms):
    """Round t pays ``rewards[t mod T]``: any oblivious adversary.

    Parameters
    ----------
    rewards : array_like, shape (T, K)
        In [0, 1].
    """

    rewards: Any
    pay = staticmethod(pay_table)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", rates_by_domain("rewards", self.rewards))
        object.__setattr__(self, "n_arms", self.rewards.shape[1])

    def parameters(self) -> Rewards:
        return Rewards(self.rewards)


def against_ucb(n_arms: int, horizon: int, beta: float = 1.0) -> RewardTable:
    """An oblivious adversary who knows UCB's arithmetic and pays least where UCB will look.

    UCB decides without chance once every arm was tried, so its choices can be computed in advance:
    the arm it will take pays 0, all others 1. (In the first K rounds each arm has a constant
    reward of its own, all different, so that neither the order in which unplayed arms are tried
    nor ties matter.) UCB earns nothing, while the best fixed arm earns about 1 - 1/K a round.
    """
    checks.integer("n_arms", n_arms, 2)
    checks.integer("horizon", horizon, n_arms)
    checks.number("beta", beta, 0.0)
    rewards = np.ones((horizon, n_arms))
    rewards[:n_arms] = np.linspace(0.5, 0.4, n_arms)
    totals, pulls = rewards[0].copy(), np.ones(n_arms)
    for t in range(n_arms, horizon):
        arm = int(np.argmax(totals / pulls + beta * np.sqrt(2.0 * math.log(t) / pulls)))
        rewards[t, arm] = 0.0
        pulls[arm] += 1.0
    return RewardTable(rewards)


def misleading(n_arms: int, horizon: int) -> RewardTable:
    """A sequence that deceives: arm 0 pays 1 in the first sixteenth of the rounds, then arm 1 does.

    The others pay 0. Arm 1 is best, with 15/16 a round; uniform play earns 1/K, and a policy that
    trusts what it saw first 1/16. One that does not learn, or not anew, has linear regret.
    """
    checks.integer("n_arms", n_arms, 2)
    checks.integer("horizon", horizon, 16)
    rewards = np.zeros((horizon, n_arms))
    rewards[: horizon // 16, 0] = 1.0
    rewards[horizon // 16 :, 1] = 1.0
    return RewardTable(rewards)
