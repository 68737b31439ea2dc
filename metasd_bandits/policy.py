"""The interface between a bandit and whoever pulls arms: decoder, simulator, replay."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "Policy"]


class Decision(NamedTuple):
    """A chosen arm and the probability with which it was chosen.

    Attributes
    ----------
    arm : int
        In [0, K).
    propensity : float
        In (0, 1]: the policy's probability of this arm, given all it had seen.
    """

    arm: int
    propensity: float


class Policy(ABC):
    """A bandit policy: hyperparameters fixed at construction, and a small state.

    Subclass it to plug your own policy into decoding, simulation and replay: three methods are
    enough (`reset`, `select`, `update`); `probabilities` is needed where propensities are
    recorded, `state_dict` and `load_state_dict` where a run is to be saved. Rewards lie in
    [0, 1]. `metasd_bandits.testing.check_policy` tells whether a class keeps the contract.
    """

    name: ClassVar[str] = "custom"
    symmetric: ClassVar[bool] = True
    """False for a policy that prefers an arm by its place, as a fixed choice does."""

    @abstractmethod
    def reset(self, n_arms: int, seed: int | None = None) -> None:
        """Forget everything and face `n_arms` fresh arms.

        Parameters
        ----------
        n_arms : int
            K, at least 1.
        seed : int, optional
            Restarts the random stream; None lets the present stream run on (and starts from 0
            where there is none yet).
        """

    def begin(self, n_arms: int, seed: int | None = None) -> None:
        """Start a query: here a `reset`; `metasd_bandits.carried.Carried` keeps its evidence."""
        self.reset(n_arms, seed)

    @abstractmethod
    def select(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> int:
        """Choose an arm for the next round and count its pull as in flight.

        Parameters
        ----------
        available : sequence of bool, shape (K,), optional
            False masks an arm for this round (a drafter that broke); None means all.

        Raises
        ------
        ValueError
            If no arm is available.
        """

    @abstractmethod
    def update(
        self,
        arm: int,
        reward: float,
        *,
        cost: float = 1.0,
        propensity: float = math.nan,
        rewards: Sequence[float] | NDArray[np.float64] | None = None,
    ) -> None:
        """Learn from one finished round.

        Parameters
        ----------
        arm : int
            The arm that was pulled.
        reward : float
            In [0, 1].
        cost : float, default 1.0
            What the round took, positive and finite (plain target steps); most policies ignore it.
        propensity : float, optional
            The probability with which the arm was chosen, where feedback is delayed and the
            policy has moved on since; NaN means "as at this arm's last selection".
        rewards : sequence of float, shape (K,), optional
            Every arm's reward, where the round is a full-information one.

        Raises
        ------
        ValueError
            If a value is NaN, infinite or out of range; the state is unchanged then.
        """

    def update_many(
        self,
        arms: Sequence[int],
        rewards: Sequence[float],
        *,
        costs: Sequence[float] | None = None,
        propensities: Sequence[float] | None = None,
    ) -> None:
        """Learn from rounds that ended together (the rows of a batch): as `update`, in order.

        By default it does just that, and takes back what was learned if one is refused.
        Full-information rounds come one at a time, through `update`.

        Parameters
        ----------
        arms, rewards : sequence of length n
            As for `update`, one for each round.
        costs, propensities : sequence of length n, optional
            Likewise; without them, those that `update` assumes.

        Raises
        ------
        ValueError
            If the lengths differ, or a round's feedback is refused; the state is unchanged then.
        """
        n = len(arms)
        costs = [1.0] * n if costs is None else costs
        propensities = [math.nan] * n if propensities is None else propensities
        before = copy.deepcopy(vars(self))
        try:
            for arm, reward, cost, p in zip(arms, rewards, costs, propensities, strict=True):
                self.update(arm, reward, cost=cost, propensity=p)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def probabilities(
        self, available: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """The probability of each arm at the next decision, shape (K,), without taking it."""
        raise TypeError(
            f"policy {self.name!r} does not tell its probabilities; implement "
            "probabilities() where propensities must be recorded"
        )

    def decide(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> Decision:
        """`select`, with the propensity of what it chose (NaN if the policy cannot tell)."""
        try:
            p = self.probabilities(available)
        except TypeError:
            return Decision(self.select(available), math.nan)
        arm = self.select(available)
        return Decision(arm, float(p[arm]))

    def forget(self, keep: float, seed: int | None = None) -> None:
        """Let all evidence count for `keep` of what it did; pulls in flight are dropped.

        Counts, sums and log-weights are multiplied by `keep`, so that means stay and confidence
        shrinks: 1 forgets nothing, 0 everything. A seed restarts the random stream.
        """
        raise TypeError(f"policy {self.name!r} cannot be carried; implement forget()")

    def rearrange(self, arms: Sequence[int | None]) -> None:
        """Add, remove or reorder arms between queries.

        Parameters
        ----------
        arms : sequence of int or None
            The new arms: each an arm's former place, or None for one never seen before, which
            starts untried. ``[0, 2, None]`` drops arm 1 of three and adds another.
        """
        raise TypeError(f"policy {self.name!r} cannot change its arms; implement rearrange()")

    def state_dict(self) -> dict[str, Any]:
        """Everything a later `load_state_dict` needs to go on as if nothing had happened."""
        raise TypeError(f"policy {self.name!r} cannot be saved; implement state_dict()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state that `state_dict` gave, random stream included.

        Raises
        ------
        ValueError
            If a part of the state is missing, of another policy, or cannot be; nothing is changed.
        """
        raise TypeError(f"policy {self.name!r} cannot be restored; implement load_state_dict()")
