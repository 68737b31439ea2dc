r"""Which tokens a block of limited size verifies: the likeliest to stand.

Node i stands with probability :math:`w_i = c_i \, w_{\mathrm{parent}(i)}`, the product of the
chances along its path, so that a block S of nodes, closed under parents, brings
:math:`1 + \sum_{i \in S} w_i` tokens on average, however outcomes depend on each other. As no
node has a larger w than its parent, the m nodes of largest w are closed by themselves: no block of
m nodes brings more (ours, docs/theory.md, theorem 4). For one drafter this is EAGLE-2's
selection (arXiv 2406.16858); here nodes come from several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from metasd_bandits import checks

__all__ = ["Merged", "allocate", "best_width", "merge", "path_chances"]


class Merged(NamedTuple):
    """Several drafters' trees as one.

    Attributes
    ----------
    parents, tokens : list of int, length n
        Of each node; a parent stands before its children.
    proposals : list of list of (int, int), length n
        Who proposed the node: pairs (drafter's place in the list, node's place in its tree).
    """

    parents: list[int]
    tokens: list[int]
    proposals: list[list[tuple[int, int]]]


def merge(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Merged:
    """One tree out of several: nodes of equal token and equal parent are one node.

    Parameters
    ----------
    trees : sequence of (parents, tokens)
        One for each drafter, empty where it proposed nothing.

    Examples
    --------
    >>> merge([([-1, 0], [7, 8]), ([-1, 0, -1], [7, 9, 5])])
    Merged(parents=[-1, 0, 0, -1], tokens=[7, 8, 9, 5],
           proposals=[[(0, 0), (1, 0)], [(0, 1)], [(1, 1)], [(1, 2)]])
    """
    merged = Merged([], [], [])
    places: dict[tuple[int, int], int] = {}
    for drafter, (parents, tokens) in enumerate(trees):
        own: list[int] = []
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            key = (own[parent] if parent >= 0 else -1, token)
            place = places.setdefault(key, len(merged.parents))
            if place == len(merged.parents):
                merged.parents.append(key[0])
                merged.tokens.append(token)
                merged.proposals.append([])
            merged.proposals[place].append((drafter, node))
            own.append(place)
    return merged


def path_chances(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """The probability that each node stands: the product of the chances on its path.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a parent does not stand before its child, or a chance is outside [0, 1].

    Examples
    --------
    >>> path_chances([-1, 0, 0, -1], [0.5, 0.5, 0.25, 0.3])
    [0.5, 0.25, 0.125, 0.3]
    """
    if len(parents) != len(chances):
        raise checks.ConfigError(f"{len(parents)} parents but {len(chances)} chances; give as many")
    products: list[float] = []
    for i, (parent, chance) in enumerate(zip(parents, chances, strict=True)):
        if not -1 <= parent < i:
            raise checks.ConfigError(f"node {i} has parent {parent}; give one of -1 .. {i - 1}")
        if not 0.0 <= chance <= 1.0:
            raise checks.ConfigError(f"chances[{i}]={chance!r} is outside the allowed range [0, 1]")
        products.append(float(chance) if parent < 0 else products[parent] * float(chance))
    return products


def allocate(parents: Sequence[int], chances: Sequence[float], budget: int) -> list[int]:
    """The at most `budget` nodes that are likeliest to stand, in ascending order.

    They are closed under parents, and no other set of as many nodes has a larger sum of
    probabilities to stand. Among equals the earlier node is taken; what cannot stand is not.

    Parameters
    ----------
    parents : sequence of int, length n
        -1, or a node before this one.
    chances : sequence of float, length n
        In [0, 1]: that the node stands given that its parent stood.
    budget : int
        At least 0.

    Examples
    --------
    >>> allocate([-1, 0, 1, -1], [0.9, 0.5, 0.9, 0.42], budget=3)
    [0, 1, 3]
    """
    checks.integer("budget", budget, 0)
    products = path_chances(parents, chances)
    order = sorted(range(len(products)), key=products.__getitem__, reverse=True)  # stable
    return sorted(i for i in order[:budget] if products[i] > 0.0)


def best_width(gains: Sequence[float], cost: Callable[[int], float]) -> int:
    """How many nodes bring the most tokens per time: the n of largest (1 + gains) / cost(n).

    Parameters
    ----------
    gains : sequence of float
        What each further node is expected to add, in the order in which nodes are taken.
    cost : callable
        ``cost(n)``: time of a round with n nodes, positive; measured, of any shape.

    Returns
    -------
    int
        In [0, len(gains)]; the smallest among equals.

    Examples
    --------
    >>> best_width([0.5, 0.2, 0.1], lambda n: 1.0 + 0.2 * n)
    1
    >>> best_width([0.5, 0.2, 0.1], lambda n: 1.0 if n < 6 else 1.3)
    3
    """
    tokens, best, fastest = 1.0, 0, 1.0 / checks.number("cost(0)", cost(0), 0.0, open_low=True)
    for n, gain in enumerate(gains, start=1):
        tokens += gain
        rate = tokens / checks.number(f"cost({n})", cost(n), 0.0, open_low=True)
        if rate > fastest:
            best, fastest = n, rate
    return best
