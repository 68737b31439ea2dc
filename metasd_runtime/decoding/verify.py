"""Verification: which path of a draft the target accepts, and the token it adds.

Pure functions of the draft, the target's scores and uniform numbers. Greedy verification
follows the drafts that equal the target's first maximum. Speculative sampling (Leviathan et al.
2022; Chen et al. 2023) accepts a draft x with probability min(1, p(x) / q(x)) and, at a rejection,
goes on with the normalised positive part of p - q: it tries the next sibling against that, if the
draft is a tree (recursive rejection: SpecInfer, Miao et al. 2023), and draws the token from it
where no sibling is left. What is emitted follows p exactly (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.randomness import Purpose
from metasd_runtime.decoding.sampling import Sampling, draw, first_maxima

__all__ = ["Verdict", "acceptance", "greedy", "residual", "speculative", "verify"]


class Verdict(NamedTuple):
    """The outcome of one verification.

    Attributes
    ----------
    path : list of int
        The drafted nodes that stand, each behind the one before; of a chain the first N_acc.
    token : int
        The correction where a draft was rejected, the bonus where all stood; None where the
        text ends with a draft.
    """

    path: list[int]
    token: int | None

    @property
    def accepted(self) -> int:
        """N_acc, drafts that stand."""
        return len(self.path)

    @property
    def rows(self) -> list[int]:
        """Places along the path in the block that was verified, the text's last token first."""
        return [0, *(node + 1 for node in self.path)]

    def tokens(self, draft: Draft) -> list[int]:
        """What the draft's round emits, unless the text ends before."""
        drafted = [draft.tokens[node] for node in self.path]
        return drafted if self.token is None else [*drafted, self.token]


Reach = Callable[[int], bool]


def verify(
    draft: Draft, scores: Tensor, position: int, sampling: Sampling, reach: Reach | None = None
) -> Verdict:
    """Verify a draft as the query's sampling demands.

    Parameters
    ----------
    draft : Draft
        n drafted tokens.
    scores : (n + 1, vocabulary)
        The target's processed scores; row 0 follows the text, row j + 1 follows draft j.
    position : int
        Place of the draft's first token in the sequence, the key of its random numbers.
    reach : callable, optional
        Told of each row once, when verification comes to it and before its scores are looked at;
        False says that the text ends there.
    """
    if not sampling.do_sample:
        return greedy(draft, scores, reach)
    if draft.probs is not None:  # a drafter may live on another device
        draft = Draft(draft.tokens, draft.probs.to(scores.device), parents=draft.parents)
    return speculative(
        draft,
        scores,
        lambda depth, sibling: sampling.uniform(position + depth, Purpose.ACCEPT, sibling),
        lambda depth: sampling.uniform(position + depth, Purpose.SAMPLE),
        reach,
    )


def greedy(draft: Draft, scores: Tensor, reach: Reach | None = None) -> Verdict:
    """Follow the drafts that are the target's first maximum."""
    best = first_maxima(scores) if reach is None else []  # all at once, where no row has to wait
    here = [-1]
    while True:
        row = here[0] + 1
        if reach is not None and not reach(row):
            return Verdict(draft.path(here[0]), None)
        token = best[row] if best else first_maxima(scores[row : row + 1])[0]
        agreeing = [node for node in draft.children(here) if draft.tokens[node] == token]
        if not agreeing:
            return Verdict(draft.path(here[0]), token)
        here = agreeing


def speculative(
    draft: Draft,
    scores: Tensor,
    coin: Callable[[int, int], float],
    quantile: Callable[[int], float],
    reach: Reach | None = None,
) -> Verdict:
    """Speculative sampling along a draft.

    At each depth the siblings are tried in turn, each against what is left of the target's
    distribution once those before it were rejected. Siblings of one token (from drafters that
    drafted independently) go on together.

    Parameters
    ----------
    draft : Draft
        Its ``probs`` are the distributions the tokens were really drawn from; None is one-hot.
    scores : (n + 1, vocabulary)
        The target's.
    coin : callable
        ``(depth, sibling)``, both from 0, to a number in [0, 1): a draft stands if it is below
        min(1, p(x) / q(x)).
    quantile : callable
        ``depth`` to the number in [0, 1) that draws the token where no draft stands.
    reach : callable, optional
        As for `verify`.
    """
    here: list[int] = [-1]
    for depth in range(draft.depth + 1):
        if reach is not None and not reach(here[0] + 1):
            return Verdict(draft.path(here[0]), None)
        p = scores[here[0] + 1].softmax(-1)
        siblings = draft.children(here)
        for i, node in enumerate(siblings):
            if coin(depth, i) < acceptance(draft, node, p):
                here = draft.same(node, siblings)
                break
            p = residual(draft, node, p)
        else:
            break
    return Verdict(draft.path(here[0]), draw(p, quantile(depth)))


def acceptance(draft: Draft, node: int, p: Tensor) -> float:
    """min(1, p(x) / q(x)) of one drafted token, p being what its siblings left."""
    token = draft.tokens[node]
    q = 1.0 if draft.probs is None else float(draft.probs[node, token])
    return min(1.0, float(p[token]) / q)


def residual(draft: Draft, node: int, p: Tensor) -> Tensor:
    """What is left of p once a draft is rejected: (p - q)+, normalised."""
    if draft.probs is None:
        rest = p.clone()
        rest[draft.tokens[node]] = 0.0
    else:
        rest = (p - draft.probs[node]).clamp(min=0.0)
    total = rest.sum()
    # Where p = q nothing is rejected in exact arithmetic; rounding may, and then p is all there is.
    return rest / total if float(total) > 0.0 else p
