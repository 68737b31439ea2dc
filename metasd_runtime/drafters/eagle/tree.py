"""EAGLE over trees: a static one (Li et al. 2024), or one that grows by confidence (EAGLE-2, 2024).

The head computes all nodes of one depth in one step. Greedy, a node's children are the head's
likeliest tokens. Under sampling the static tree's are drawn without replacement. Which nodes a
dynamic tree keeps depends on what they hold, and a drawn token must not be dropped for what it is,
so its children are the likeliest under sampling too: nothing is drawn, their distribution is
one-hot (docs/method.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.output_head import DraftHead
from metasd_runtime.model.target import Target

__all__ = ["DynamicTree", "EagleTree", "Node", "StaticTree", "TreeShape", "make_tree"]


@dataclass
class Node:
    """A drafted token on its way into a tree.

    Attributes
    ----------
    token : int
    parent : int
        Its parent's place among the nodes, -1 right behind the text.
    ranks : tuple of int
        Which child it is, for each node from the text's end to itself; 0 is the first.
    confidence : float
        Product of the head's probabilities along its path.
    """

    token: int
    parent: int
    ranks: tuple[int, ...]
    confidence: float


class TreeShape(ABC):
    """Which nodes a tree has.

    Attributes
    ----------
    name : str
    breadth : int
        Most nodes of one depth that have children.
    drawn : bool
        Whether children are drawn under sampling.
    """

    name: str
    breadth: int
    drawn: bool

    @abstractmethod
    def children(self, ranks: tuple[int, ...]) -> int:
        """How many children a node has, which has some."""

    @abstractmethod
    def expanded(self, nodes: Sequence[Node], new: Sequence[int]) -> list[int]:
        """Those of the newest depth's nodes that have children, by their places, in order."""

    @abstractmethod
    def most_nodes(self, depth: int) -> int:
        """Most nodes that are verified, of a tree no deeper than this."""

    def kept(self, nodes: Sequence[Node]) -> list[int]:
        """The places of the nodes that are verified, in order."""
        return list(range(len(nodes)))


@dataclass(frozen=True)
class StaticTree(TreeShape):
    """EAGLE's static tree: 25 nodes, five deep, wide where the head is surest."""

    name = "static"
    breadth = 4
    drawn = True
    counts: Mapping[tuple[int, ...], int] = field(
        default_factory=lambda: {
            (): 4,
            (0,): 3,
            (1,): 2,
            (2,): 2,
            (3,): 1,
            (0, 0): 3,
            (0, 1): 2,
            (0, 2): 2,
            (1, 0): 1,
            (0, 0, 0): 3,
            (0, 0, 0, 0): 2,
        },
        repr=False,
    )

    def children(self, ranks: tuple[int, ...]) -> int:
        return self.counts[ranks]

    def most_nodes(self, depth: int) -> int:
        return sum(k for ranks, k in self.counts.items() if len(ranks) < depth)

    def expanded(self, nodes: Sequence[Node], new: Sequence[int]) -> list[int]:
        return [node for node in new if nodes[node].ranks in self.counts]


@dataclass(frozen=True)
class DynamicTree(TreeShape):
    """EAGLE-2's tree: the surest nodes of each depth are expanded, the surest of all kept.

    Parameters
    ----------
    nodes : int, default 12
        Most nodes that are verified: a dozen paid best on a CPU (docs/training.md).
    breadth : int, default 4
        Nodes of each depth that are expanded, and children of each.
    """

    nodes: int = 12
    breadth: int = 4
    name = "dynamic"
    drawn = False

    def __post_init__(self) -> None:
        checks.integer("nodes", self.nodes, 1)
        checks.integer("breadth", self.breadth, 1)

    def children(self, ranks: tuple[int, ...]) -> int:
        return self.breadth

    def most_nodes(self, depth: int) -> int:
        return self.nodes

    def expanded(self, nodes: Sequence[Node], new: Sequence[int]) -> list[int]:
        return sorted(_surest(nodes, new)[: self.breadth])

    def kept(self, nodes: Sequence[Node]) -> list[int]:
        # No node is surer than its parent, and of equals the parent comes first.
        return sorted(_surest(nodes, range(len(nodes)))[: self.nodes])


def _surest(nodes: Sequence[Node], places: Sequence[int]) -> list[int]:
    return sorted(places, key=lambda place: -nodes[place].confidence)


def make_tree(kind: str, nodes: int | None = None) -> TreeShape:
    """A tree's shape by name: ``static``, or ``dynamic`` with at most so many `nodes` (12).

    Raises
    ------
    ConfigError
        For another name, or nodes of a static tree.
    """
    checks.choice("tree", kind, ("static", "dynamic"))
    if kind == "dynamic":
        return DynamicTree() if nodes is None else DynamicTree(nodes)
    if nodes is not None:
        raise checks.ConfigError(f"nodes={nodes}: the static tree has 25; give tree=dynamic")
    return StaticTree()


class EagleTree(Eagle):
    """An EAGLE head that drafts trees, at most as deep as a block may be long.

    Parameters
    ----------
    tree : TreeShape
        Its name stands behind the drafter's, as in ``eagle-code:dynamic``.
    shape, weights, vocabulary, target, name, head
        As for `Eagle`.

    Raises
    ------
    ConfigError
        For a target that cannot read a tree in one forward.
    """

    def __init__(
        self,
        tree: TreeShape,
        shape: EagleShape,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor,
        target: Target,
        name: str = "eagle",
        head: DraftHead | None = None,
    ) -> None:
        super().__init__(shape, weights, vocabulary, target, f"{name}:{tree.name}", head)
        target.refuse_trees()
        self.tree = tree

    def most_tokens(self, n: int) -> int:
        return self.tree.most_nodes(n)

    def _room(self, n: int) -> int:
        return self.tree.breadth * n

    def _draft(
        self, out: Tensor, logits: Tensor, tokens: Sequence[int], n: int, sampling: Sampling
    ) -> Draft:
        """Grow the tree depth by depth, then keep what is to be verified."""
        nodes, rows = list[Node](), list[Tensor]()
        parents, read = [-1], list[int]()
        for depth in range(1, n + 1):
            new = self._bear(logits, nodes, parents, tokens, sampling, rows)
            confident = [i for i in new if nodes[i].confidence >= sampling.draft_threshold]
            expanded = self.tree.expanded(nodes, confident)
            if depth == n or not expanded:
                break
            out = out[[parents.index(nodes[i].parent) for i in expanded]]
            out, logits = self._grow(out, nodes, expanded, read)
            parents, read = expanded, read + expanded
        kept = self.tree.kept(nodes)
        place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        return Draft(
            [nodes[i].token for i in kept],
            torch.stack(rows) if rows else None,
            parents=[place[nodes[i].parent] for i in kept],
        )

    def _bear(
        self,
        logits: Tensor,
        nodes: list[Node],
        parents: Sequence[int],
        tokens: Sequence[int],
        sampling: Sampling,
        rows: list[Tensor],
    ) -> list[int]:
        """Append the children of `parents`, whose `logits` are given; the places of the new.

        What they were drawn from, if they were, is appended to `rows`.
        """
        before = [_text(nodes, parent) for parent in parents]
        counts = [self.tree.children(nodes[p].ranks if p >= 0 else ()) for p in parents]
        born = len(nodes)
        if self.tree.drawn and sampling.do_sample:
            scattered = self._scattered(logits)
            probs = sampling.distributions(scattered, tokens, before.__getitem__)
            for i, (parent, k) in enumerate(zip(parents, counts, strict=True)):
                position = len(tokens) + len(before[i])
                children = sampling.draw_children(probs[i], position, k, parent)
                rows += [row for _, row in children]
                _append(nodes, parent, [(token, float(probs[i, token])) for token, _ in children])
        else:
            probs = self._probabilities(logits, tokens, before, sampling)
            best, which = probs.topk(min(max(counts), probs.shape[1]))
            likeliest = self._head.tokens[which].tolist()
            for parent, k, *pairs in zip(parents, counts, likeliest, best.tolist(), strict=True):
                _append(nodes, parent, list(zip(*pairs, strict=True))[:k])
        return list(range(born, len(nodes)))

    def _probabilities(
        self, logits: Tensor, tokens: Sequence[int], before: Sequence[list[int]], sampling: Sampling
    ) -> Tensor:
        """(m, n) of the tokens that can be drafted; by way of all tokens only if it must be."""
        if not sampling.shapes_drafts:
            return logits.softmax(-1)
        probs = sampling.distributions(self._scattered(logits), tokens, before.__getitem__)
        return probs[:, self._head.tokens]

    def _grow(
        self, out: Tensor, nodes: Sequence[Node], expanded: Sequence[int], read: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The head's outputs and logits at one depth's expanded nodes; `out` is their parents'.

        `read` are the nodes whose pairs stand behind the text's already; each node attends to
        the text, its ancestors and itself.
        """
        ids = torch.tensor([nodes[i].token for i in expanded], device=self._device)
        place = self._length + len(nodes[expanded[0]].ranks) - 1
        columns = [*read, *expanded]
        lines = [_line(nodes, i) for i in expanded]
        apart = torch.tensor([[c not in line for c in columns] for line in lines])
        hidden = torch.nn.functional.pad(apart, (self._length, 0)).to(self._device)
        if self.compiled is not None and self.compiled.serves("level", len(ids), place):
            return self.compiled.level(self, out, ids, place, hidden)
        return self._eager_level(out, ids, place, hidden)

    def _eager_level(
        self, out: Tensor, ids: Tensor, place: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take in m nodes of one depth; the output and the logits behind each.

        Parameters
        ----------
        out : (m, hidden)
            At their parents.
        ids : (m,) int64
        place : int
            Where in the text they stand, all of them.
        hidden : (m, pairs) bool
            What each must not see; the last m pairs are their own.
        """
        x = self._enter("chain", out, ids)
        end = hidden.shape[1]
        q = self._take_in(x, end - ids.shape[0], slice(place, place + 1))
        out = self._feed(x, self._attend(q, end, hidden))
        return out, self._scores(out)


def _append(nodes: list[Node], parent: int, children: Sequence[tuple[int, float]]) -> None:
    ranks, confidence = ((), 1.0) if parent < 0 else (nodes[parent].ranks, nodes[parent].confidence)
    for rank, (token, p) in enumerate(children):
        if p > 0.0:
            nodes.append(Node(token, parent, (*ranks, rank), confidence * p))


def _line(nodes: Sequence[Node], node: int) -> list[int]:
    """The places from a node up to the text's end, itself the first."""
    line = []
    while node >= 0:
        line.append(node)
        node = nodes[node].parent
    return line


def _text(nodes: Sequence[Node], node: int) -> list[int]:
    """The tokens from the text's end down to a node, its own the last."""
    return [nodes[i].token for i in reversed(_line(nodes, node))]
