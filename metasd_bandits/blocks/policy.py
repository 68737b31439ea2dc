"""Policies that choose a set: a block of nodes under a budget, learned from cascades.

Whoever decodes collects the round's candidates, asks `SetPolicy.select` which of them to verify,
and gives what verification showed to `SetPolicy.update`. To choose one drafter a round, as a
`metasd_bandits.policy.Policy` does, is a special case: `OneArm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from metasd_bandits import checks
from metasd_bandits.blocks.allocation import allocate
from metasd_bandits.blocks.calibration import Calibrator
from metasd_bandits.policy import Policy

__all__ = ["BlockUCB", "Candidates", "OneArm", "SetPolicy", "observed"]


class Candidates(NamedTuple):
    """The nodes that a round could verify, drafters merged.

    Attributes
    ----------
    parents : sequence of int, length n
        -1, or a node before this one.
    owners : sequence of sequence of int, length n
        The drafters that proposed the node, at least one.
    keys : sequence of int, length n
        The node's bin of evidence (`metasd_bandits.blocks.calibration.Calibrator`).
    """

    parents: Sequence[int]
    owners: Sequence[Sequence[int]]
    keys: Sequence[int]


class SetPolicy(ABC):
    """Chooses which candidates fill a block, and learns which of them stood."""

    name: ClassVar[str] = "custom"

    @abstractmethod
    def select(self, candidates: Candidates, budget: int) -> list[int]:
        """The nodes to verify: at most `budget`, ascending, none without its parent."""

    @abstractmethod
    def update(
        self, candidates: Candidates, kept: Sequence[int], stood: Sequence[bool | None]
    ) -> None:
        """Learn from one round.

        Parameters
        ----------
        candidates : Candidates
        kept : sequence of int
            What `select` gave.
        stood : sequence of bool or None, length n
            For each candidate whether it stood; None where nobody knows. Nodes that were not
            verified may be known too: under greedy decoding the emitted token tells.
        """

    @abstractmethod
    def begin(self, seed: int | None = None) -> None:
        """Start a query."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything a later `load_state_dict` needs to go on as if nothing had happened."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state that `state_dict` gave."""


def observed(parents: Sequence[int], stood: Sequence[bool | None]) -> list[int]:
    """The nodes that say something about their chance: known, and their parent stood.

    Examples
    --------
    >>> observed([-1, 0, 1, 0, -1], [True, False, False, None, False])
    [0, 1, 4]
    """
    return [
        i
        for i, parent in enumerate(parents)
        if stood[i] is not None and (parent < 0 or stood[parent])
    ]


class BlockUCB(SetPolicy):
    """The likeliest nodes by calibrated chances: CombCascade's rule on a tree.

    Parameters
    ----------
    calibrator : Calibrator
        Its ``bonus`` makes the choice optimistic.
    keep : float, default 1.0
        In [0, 1]: what evidence counts for in the next query.

    Notes
    -----
    Kveton, Wen, Ashkan, Szepesvari (2015), "Combinatorial cascading bandits"; the best set is
    found by `metasd_bandits.blocks.allocation.allocate`.
    """

    name = "block-ucb"

    def __init__(self, calibrator: Calibrator, keep: float = 1.0) -> None:
        self.calibrator = calibrator
        self.keep = checks.number("keep", keep, 0.0, 1.0)

    def begin(self, seed: int | None = None) -> None:
        self.calibrator.forget(self.keep)

    def select(self, candidates: Candidates, budget: int) -> list[int]:
        chances = self.calibrator.chance(candidates.keys).tolist()
        return allocate(candidates.parents, chances, budget)

    def update(
        self, candidates: Candidates, kept: Sequence[int], stood: Sequence[bool | None]
    ) -> None:
        seen = observed(candidates.parents, stood)
        self.calibrator.observe([candidates.keys[i] for i in seen], [bool(stood[i]) for i in seen])

    def state_dict(self) -> dict[str, Any]:
        return {"keep": self.keep, "calibrator": self.calibrator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("keep") != self.keep:
            raise ValueError(f"this state keeps {state.get('keep')}, not {self.keep}")
        self.calibrator.load_state_dict(state["calibrator"])


class OneArm(SetPolicy):
    """One drafter's nodes alone fill the block: any `Policy` as the special case of a set.

    Parameters
    ----------
    policy : Policy
        Chooses the drafter; those that proposed nothing are masked.
    n_arms : int
        Drafters.
    reward : callable, optional
        ``reward(accepted, depth, budget)`` in [0, 1]; block efficiency, accepted / depth, by
        default.
    """

    name = "one-arm"

    def __init__(
        self,
        policy: Policy,
        n_arms: int,
        reward: Callable[[int, int, int], float] | None = None,
    ) -> None:
        self.policy, self.n_arms = policy, checks.integer("n_arms", n_arms, 1)
        self.reward = reward or _efficiency
        self._arm: int | None = None
        self._budget = 0

    def begin(self, seed: int | None = None) -> None:
        self.policy.begin(self.n_arms, seed)

    def select(self, candidates: Candidates, budget: int) -> list[int]:
        self._arm, self._budget = None, budget
        proposing = {owner for owners in candidates.owners for owner in owners}
        if not proposing:
            return []
        arm = self.policy.select([i in proposing for i in range(self.n_arms)])
        self._arm = arm
        return [i for i, owners in enumerate(candidates.owners) if arm in owners][:budget]

    def update(
        self, candidates: Candidates, kept: Sequence[int], stood: Sequence[bool | None]
    ) -> None:
        if self._arm is None:
            return
        depth = 0
        deep: dict[int, int] = {}
        for i in kept:
            deep[i] = deep.get(candidates.parents[i], 0) + 1
            depth = max(depth, deep[i])
        accepted = sum(bool(stood[i]) for i in kept)
        self.policy.update(self._arm, self.reward(accepted, depth, self._budget))

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])


def _efficiency(accepted: int, depth: int, budget: int) -> float:
    return accepted / depth if depth else 0.0
