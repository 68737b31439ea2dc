"""The round record: everything one round of speculative decoding can teach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Node", "Round"]


class Node(NamedTuple):
    """A token of a block that several drafters filled.

    Attributes
    ----------
    token : int
    parent : int
        Its parent's place in the block, before it, or -1 right behind the text.
    owners : tuple of int
        Who proposed it, by their places in the trace header's ``meta["proposers"]``.
    chance : float
        The chance it was given to stand where its parent does, in [0, 1].
    stood : bool or None
        Whether it did; None where its parent did not.
    """

    token: int
    parent: int
    owners: tuple[int, ...]
    chance: float
    stood: bool | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round: a drafter proposes a block, one target forward verifies it.

    The simulator produces it, the decoder records it, a trace stores it, replay reads it back.

    Attributes
    ----------
    query : str
        Which prompt (and, in a batch, which row) the round belongs to.
    index : int
        The round's place within its query, from 0.
    arm : int
        The drafter that was used, an index into the trace header's ``arms``.
    drafted : int
        Tokens drafted: 0..N of a chain, every node of a draft tree.
    accepted : int
        Drafted tokens that verification accepted, 0..drafted.
    emitted : int
        Tokens that reached the output: accepted + 1, less what a stop cut off.
    block_efficiency : float
        Accepted over the draft's depth (of a chain, over ``drafted``), in [0, 1]; 0 where nothing
        was drafted.
    block_divergence : float
        Mean of 1 - TV(p_j, q_j) over the drafted positions, in [0, 1]; 0 where nothing was drafted.
        Of a tree, the mean chance over its depths that a sibling on the path is accepted.
    reward : float
        What the policy was given, in [0, 1].
    propensity : float
        Probability with which the policy chose the arm, in (0, 1]; NaN where it could not tell.
    draft_seconds, verify_seconds, switch_seconds : float
        Wall time of drafting, of the target's forward with verification, and of bringing a
        drafter's cache up to date.
    owed : int
        Tokens the drafter had to catch up on before it could draft.
    step : float
        The round's duration in plain target steps (the cost a cost-aware policy sees); NaN if
        it was not measured.
    rewards : tuple of float, shape (K,), optional
        Every arm's reward in this round, where all were scored (a full-information round); NaN
        for an arm that could not serve.
    tokens : tuple of int, shape (K,), optional
        Tokens every arm would have emitted in this round; 0 for an arm that could not serve.
    steps : tuple of float, shape (K,), optional
        What the round would have cost with every arm, in plain target steps.
    depth : int
        Positions drafted, where the draft was a tree: its longest path. 0 for a chain, whose depth
        is ``drafted``.
    nodes : tuple of Node, optional
        Of a block put together from several drafters' tokens: each of them, in the block's order.
    """

    query: str
    index: int
    arm: int
    drafted: int
    accepted: int
    emitted: int
    block_efficiency: float
    block_divergence: float
    reward: float
    propensity: float = math.nan
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    switch_seconds: float = 0.0
    owed: int = 0
    step: float = math.nan
    rewards: tuple[float, ...] | None = None
    tokens: tuple[int, ...] | None = None
    steps: tuple[float, ...] | None = None
    depth: int = 0
    nodes: tuple[Node, ...] | None = None

    @property
    def positions(self) -> int:
        """Positions of the text that were drafted: the draft's depth."""
        return self.depth or self.drafted

    @property
    def seconds(self) -> float:
        """Wall time of the round, without the bandit's own."""
        return self.draft_seconds + self.verify_seconds + self.switch_seconds
