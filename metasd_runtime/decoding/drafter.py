"""Drafting: what a drafter is, what a draft holds, and what makes one unusable.

A draft is a chain of tokens, each behind the one before, or a tree of them, of which verification
follows one path.
"""

from __future__ import annotations

import copy
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.model.tree import depths

__all__ = [
    "Draft",
    "Drafter",
    "DrafterUnavailableError",
    "check_draft",
    "draft_block",
    "drawn_block",
    "features_of",
]


class DrafterUnavailableError(RuntimeError):
    """A drafter cannot go on in this query (out of context, say); decoding does, without it."""


@dataclass
class Draft:
    """A draft: a block of tokens, or a tree of them.

    Attributes
    ----------
    tokens : list of int
        No more behind one another than were asked for; empty means "no draft this round".
    probs : (n, vocabulary) tensor, optional
        Row j is the distribution token j was *really* drawn from, after temperature and filters,
        given all tokens before it in the list (of siblings drawn without replacement, the later
        rows lack the earlier tokens).
        Under greedy decoding, where nothing is drawn, it is the drafter's own soft distribution.
        None: the drafter is deterministic, its distribution one-hot.
    owed : int
        Tokens the drafter had to catch up on before it could draft.
    switch_seconds : float
        Time spent on catching up.
    parents : list of int, optional
        Of a tree: for each token (a *node*) the place of its parent, which comes before it, or
        -1 right behind the text. Siblings are tried in their order. A chain, ``[-1, 0, 1, ...]``,
        is kept as None.
    owners : sequence of tuple of int, optional
        Of a block put together from several drafters: who proposed each token, by their places
        among the `parts` of the drafter that put it together.
    chances : sequence of float, optional
        With `owners`: the chance that each token was given to stand where its parent does.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    owed: int = 0
    switch_seconds: float = 0.0
    parents: list[int] | None = None
    owners: Sequence[tuple[int, ...]] | None = None
    chances: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.parents is not None and self.parents == list(range(-1, len(self.tokens) - 1)):
            self.parents = None

    @property
    def lineage(self) -> Sequence[int]:
        """Each node's parent, a chain's as well."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    @property
    def depth(self) -> int:
        """Tokens of the longest path: the most that can be accepted."""
        return max(depths(self.lineage)) if self.parents else len(self.tokens)

    def children(self, nodes: Sequence[int]) -> list[int]:
        """The nodes right behind any of `nodes` (-1 is the text's end), in the order of trial."""
        return [node for node, parent in enumerate(self.lineage) if parent in nodes]

    def same(self, node: int, siblings: Sequence[int]) -> list[int]:
        """Those of `siblings` that hold the node's token, and so continue the same text."""
        return [other for other in siblings if self.tokens[other] == self.tokens[node]]

    def path(self, node: int) -> list[int]:
        """The nodes from the text's end to `node`, itself the last."""
        lineage, nodes = self.lineage, list[int]()
        while node >= 0:
            nodes.insert(0, node)
            node = lineage[node]
        return nodes

    def before(self, row: int) -> list[int]:
        """The drafted tokens that row `row` of the target's scores follows; row 0 follows none."""
        return [self.tokens[node] for node in self.path(row - 1)]


class Drafter(ABC):
    """Proposes blocks of tokens. Subclass it to plug in your own; `propose` is enough.

    A drafter sees the committed tokens at every call. One that keeps state of its own (a cache,
    an index) learns of a new query by `start` and of what became of each round by `commit`,
    whether or not it was the one that drafted.

    Attributes
    ----------
    name : str
        Names the arm in traces and tables; unique within a pool.
    domains : tuple of str
        The kinds of text it was trained for, if it was.
    needs_features : tuple of int
        Hidden states of the target to be given in `commit`, by the layers behind them, ascending.
    """

    name: str = "custom"
    domains: tuple[str, ...] = ()
    needs_features: tuple[int, ...] = ()

    def asked(self, n: int) -> list[tuple[Drafter, int]]:
        """Whom the arm asks for a draft of at most n tokens, and each for how many at most.

        One after another, until one drafts. Itself alone, unless the arm goes by the state of
        others, which other arms may share.
        """
        return [(self, n)]

    @property
    def bases(self) -> list[Drafter]:
        """The drafters whose state the arm uses; each is started, and told of commits, once."""
        return [drafter for drafter, _ in self.asked(1)]

    def clone(self) -> Drafter:
        """Another of the same, with state of its own: one for each row of a batch.

        By default a deep copy that shares the models among its attributes (and the target).
        """
        weights = (nn.Module, nn.Parameter)
        shared = {id(v): v for v in vars(self).values() if isinstance(v, weights)}
        return copy.deepcopy(self, shared)

    @property
    def parts(self) -> list[Drafter]:
        """Whose tokens its drafts are made of: its own, unless it puts others' together."""
        return [self]

    def most_tokens(self, n: int) -> int:
        """Most tokens of a draft n deep: n of a chain, more of a tree."""
        return n

    def blocks(self, n: int) -> set[int]:
        """Sizes of the blocks that are to be verified at most: those worth a graph each."""
        return {1 + self.most_tokens(n)}

    def start(self, tokens: Sequence[int]) -> None:
        """A new query begins with this prompt."""
        return

    @abstractmethod
    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        """Propose up to n tokens to follow `tokens` (the prompt and all that was emitted).

        A drafter that samples must draw through ``sampling.propose``, or tell the distributions
        it drew from in the draft's ``probs``. How long the block is may depend on the tokens in
        it, but none that was drawn may be left out: dropping a draft for what it is would bend
        the output towards the others. A draft may be a tree no deeper than n, its siblings drawn
        through ``sampling.draw_children``, or chosen without drawing and ``probs`` left out.

        Raises
        ------
        DrafterUnavailableError
            If it cannot go on in this query; any other exception disables it as well.
        """

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """A round ended; `tokens` is all that stands now.

        A drafter that needs features is called once behind `start` as well, for the prompt's.

        Parameters
        ----------
        features : (m, layers x hidden) tensor, optional
            The hidden states that `needs_features` names, side by side, at the m tokens the
            target's cache gained (the last of `tokens` is not among them: the target has not
            read it yet).
        """
        return


def features_of(drafter: Drafter, features: Tensor | None, given: Sequence[int]) -> Tensor | None:
    """Of hidden states that stand side by side, `given` by their layers, those of one drafter."""
    if features is None or drafter.needs_features == tuple(given):
        return features
    blocks = features.chunk(len(given), -1)
    chosen = [blocks[given.index(layer)] for layer in drafter.needs_features]
    return torch.cat(chosen, -1) if chosen else None


def draft_block(
    drafter: Drafter, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> tuple[Draft, float]:
    """Let a drafter propose, and refuse what verification could not stay lossless with.

    Returns
    -------
    draft : Draft
    seconds : float
        Time spent drafting, catching up not counted.

    Raises
    ------
    Exception
        Whatever the drafter raised, or `ValueError` for a draft that is too long, holds a token
        outside the target's vocabulary, is no tree, or tells distributions that are none.
    """
    begin = time.perf_counter()
    sampling.begin_block(len(tokens))
    draft = drafter.propose(tokens, n, sampling) if n > 0 else Draft()
    check_draft(draft, n, vocab_size, sampling.do_sample)
    elapsed = time.perf_counter() - begin
    if not 0.0 <= draft.switch_seconds <= elapsed:
        raise ValueError(f"switch_seconds={draft.switch_seconds} is no part of {elapsed:.3g} s")
    return draft, elapsed - draft.switch_seconds


def check_draft(draft: Draft, n: int, vocab_size: int, drawn: bool) -> None:
    """Bring a draft to order, or refuse it by `ValueError`."""
    draft.tokens = _checked_tokens(draft.tokens, vocab_size)
    if draft.parents is not None:
        draft.parents = _checked_parents(draft.parents, len(draft.tokens))
    if draft.depth > n:
        what = "tokens were drafted" if draft.parents is None else "tokens deep is the draft tree"
        raise ValueError(f"{draft.depth} {what} where {n} were asked for")
    if draft.probs is not None and draft.tokens:
        draft.probs = _checked_probs(draft.probs, draft.tokens, vocab_size, drawn)


def drawn_block(sampling: Sampling, n: int) -> Draft:
    """What a drafter had drawn, through `Sampling`, before it broke.

    It stands as the round's draft. Whether a drafter breaks may depend on what it drew (logits
    that are NaN behind one token, say), so to draft anew would keep some drafts and discard
    others for what they are, and the output would no longer follow the target.
    """
    within = [depth <= n for depth in depths([parent for *_, parent in sampling.drawn])]
    drawn = sampling.drawn[: within.index(False) if False in within else None]
    if not drawn:
        return Draft()
    tokens, probs, parents = zip(*drawn, strict=True)
    return Draft(list(tokens), torch.stack(probs), parents=list(parents))


def _checked_parents(parents: Sequence[int], n: int) -> list[int]:
    checked = [operator.index(parent) for parent in parents]
    if len(checked) != n:
        raise ValueError(f"the draft has {n} tokens and {len(checked)} parents; give each its own")
    for node, parent in enumerate(checked):
        if not -1 <= parent < node:
            raise ValueError(
                f"node {node} of the draft tree has parent {parent}; it must be -1 (right behind "
                "the text) or a node before it in the list"
            )
    return checked


def _checked_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    checked = [operator.index(token) for token in tokens]
    if any(not 0 <= token < vocab_size for token in checked):
        raise ValueError(f"a drafted token is outside the target's vocabulary [0, {vocab_size})")
    return checked


def _checked_probs(probs: Tensor, tokens: list[int], vocab_size: int, drawn: bool) -> Tensor:
    if probs.shape != (len(tokens), vocab_size):
        raise ValueError(
            f"the draft's probs have shape {tuple(probs.shape)}, not ({len(tokens)}, {vocab_size})"
        )
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    total = probs.sum(-1, keepdim=True)
    # The least of all tells as much as comparing each, in a twentieth of the time; NaN is neither.
    if not bool(((total - 1.0).abs() < 0.01).all() and probs.amin() >= 0):
        raise ValueError("the draft's probs are no distributions that sum to 1 (or are NaN)")
    x = torch.tensor(tokens, device=probs.device)[:, None]
    if drawn and not bool((probs.gather(1, x) > 0).all()):
        raise ValueError("a drafted token has probability 0 under the draft's own probs")
    # Drawing goes by the normalised weights, so acceptance must as well (half precision is off).
    return probs if bool(((total - 1.0).abs() < 1e-6).all()) else probs / total
