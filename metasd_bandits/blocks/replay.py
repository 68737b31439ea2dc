"""Other blocks on recorded rounds: what a log identifies, and what it does not.

A block of recorded candidates brings one token and one for each of its nodes that stood. That is
known without any assumption where each node of it was verified, or has an ancestor that fell.
So smaller budgets and other orders are identified inside what was verified; a node that nobody
verified is not, and neither is one that was never proposed: both are refused. The mean is over the
positions where the recorded rounds began; other blocks would begin theirs elsewhere (ours).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metasd_bandits import checks
from metasd_bandits.blocks.policy import Candidates, SetPolicy
from metasd_bandits.round import Node

__all__ = ["NotIdentifiedError", "first_owner", "outcome", "replay_blocks"]


class NotIdentifiedError(ValueError):
    """The log cannot tell what the block would have brought."""


def outcome(nodes: Sequence[Node]) -> list[bool | None]:
    """What the log implies for each node: behind one that fell, nothing stands.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a parent does not come before its child, or a node stood where its parent fell.

    Examples
    --------
    >>> outcome([Node(7, -1, (0,), 0.5, False), Node(8, 0, (0,), 0.5, None)])
    [False, False]
    """
    implied: list[bool | None] = []
    for i, node in enumerate(nodes):
        if not -1 <= node.parent < i:
            raise checks.ConfigError(
                f"node {i} has parent {node.parent}; give one of -1 .. {i - 1}"
            )
        fell = node.parent >= 0 and implied[node.parent] is False
        if fell and node.stood:
            raise checks.ConfigError(f"node {i} stood but its parent, node {node.parent}, fell")
        implied.append(False if fell else node.stood)
    return implied


def first_owner(node: Node) -> int:
    """The bin of evidence of a node by who proposed it first."""
    return node.owners[0]


def replay_blocks(
    rounds: Sequence[Sequence[Node]],
    policy: SetPolicy,
    budget: int,
    key: Callable[[Node], int] = first_owner,
) -> list[int]:
    """Tokens of each round had `policy` chosen the block; it learns from its own nodes alone.

    Parameters
    ----------
    rounds : sequence of sequence of Node
        The nodes of each recorded round, as `metasd_bandits.round.Round` has them.
    policy : SetPolicy
        Deterministic ones give one answer; its state goes on from round to round.
    budget : int
        Nodes of a block, at least 0.
    key : callable
        A node's bin of evidence, for the policy.

    Raises
    ------
    NotIdentifiedError
        If a chosen node was not verified, with the round, the node and its drafters.
    metasd_bandits.checks.ConfigError
        If a round contradicts itself.
    """
    checks.integer("budget", budget, 0)
    tokens = []
    for r, nodes in enumerate(rounds):
        implied = outcome(nodes)
        candidates = Candidates(
            [node.parent for node in nodes],
            [node.owners for node in nodes],
            [key(node) for node in nodes],
        )
        kept = policy.select(candidates, budget)
        for i in kept:
            if implied[i] is None:
                raise NotIdentifiedError(
                    f"round {r}: node {i}, proposed by {list(nodes[i].owners)}, is chosen but was "
                    "not verified; replay a smaller budget, or record rounds that verify it"
                )
        policy.update(candidates, kept, [x if i in kept else None for i, x in enumerate(implied)])
        tokens.append(1 + sum(bool(implied[i]) for i in kept))
    return tokens
