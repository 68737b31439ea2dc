"""A tree of drafted tokens as one forward reads it: where each node stands, and whom it sees.

A block is the text's last token and the nodes behind it, told by their parents: for each node the
place of its parent among the nodes, which comes before it, or -1 for that last token. A node
stands as far behind it as the tree is deep there, whatever its place in the list, and sees the
text, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor

__all__ = ["Block", "ancestry", "depths", "moves"]


@dataclass(frozen=True)
class Block:
    """A block about to be read.

    Attributes
    ----------
    start : int
        Tokens before it.
    parents : sequence of int
    """

    start: int
    parents: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """Of each token in the sequence."""
        return [self.start, *(self.start + depth for depth in depths(self.parents))]


def depths(parents: Sequence[int]) -> list[int]:
    """Each node's depth: 1 right behind the text."""
    deep: list[int] = []
    for parent in parents:
        deep.append(1 if parent < 0 else deep[parent] + 1)
    return deep


def ancestry(parents: Sequence[int]) -> Tensor:
    """Whom each token of a block sees within it: (n + 1, n + 1) bool, the text's last token first.

    >>> ancestry([-1, -1, 0]).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    seen = [[True, *[False] * len(parents)]]
    for node, parent in enumerate(parents, start=1):
        row = list(seen[parent + 1])
        row[node] = True
        seen.append(row)
    return torch.tensor(seen)


def moves(places: Sequence[int]) -> tuple[int, list[int]]:
    """How to bring the kept places of a block, ascending, to its front: where to, and from where.

    >>> moves([0, 1, 4, 6])
    (2, [4, 6])
    """
    stay = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(places, count())))
    return stay, list(places[stay:])
