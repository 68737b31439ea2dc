"""Verification: how much of a draft block the target accepts, and the token it adds.

Pure functions of the draft, the target's scores and uniform numbers. Greedy verification
keeps drafts that equal the target's first maximum. Speculative sampling (Leviathan et al. 2022;
Chen et al. 2023) accepts a draft x with probability min(1, p(x) / q(x)) and, at the first
rejection, draws from the normalised positive part of p - q: what is emitted follows p exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metasd_runtime.draft import Draft
from metasd_runtime.randomness import Purpose
from metasd_runtime.sampling import Sampling, draw, first_maxima

__all__ = ["Verdict", "greedy", "residual", "speculative", "verify"]


class Verdict(NamedTuple):
    """The outcome of one verification.

    Attributes
    ----------
    accepted : int
        N_acc, leading drafts that stand.
    token : int
        The correction where a draft was rejected, the bonus where all stood.
    """

    accepted: int
    token: int


def verify(draft: Draft, scores: Tensor, position: int, sampling: Sampling) -> Verdict:
    """Verify a block as the query's sampling demands.

    Parameters
    ----------
    draft : Draft
        n drafted tokens.
    scores : (n + 1, vocabulary)
        The target's processed scores; row j follows the first j drafts.
    position : int
        Place of the block's first token in the sequence, the key of its random numbers.
    """
    if not sampling.do_sample:
        return greedy(draft.tokens, scores)
    n = len(draft.tokens)
    coins = [sampling.uniform(position + j, Purpose.ACCEPT) for j in range(n)]
    quantiles = [sampling.uniform(position + j, Purpose.SAMPLE) for j in range(n + 1)]
    if draft.probs is not None:  # a drafter may live on another device
        draft = Draft(draft.tokens, draft.probs.to(scores.device))
    return speculative(draft, scores.softmax(-1), coins, quantiles)


def greedy(tokens: Sequence[int], scores: Tensor) -> Verdict:
    """Accept while each draft is the target's first maximum."""
    best = first_maxima(scores)
    for j, token in enumerate(tokens):
        if token != best[j]:
            return Verdict(j, best[j])
    return Verdict(len(tokens), best[-1])


def speculative(
    draft: Draft, p: Tensor, coins: Sequence[float], quantiles: Sequence[float]
) -> Verdict:
    """Speculative sampling over one block.

    Parameters
    ----------
    draft : Draft
        Its ``probs`` are the distributions the tokens were really drawn from; None is one-hot.
    p : (n + 1, vocabulary)
        The target's distributions.
    coins : n numbers in [0, 1)
        Draft j stands if its coin is below min(1, p(x) / q(x)).
    quantiles : n + 1 numbers in [0, 1)
        Number j draws the token that replaces draft j; the last draws the bonus.
    """
    for j, chance in enumerate(acceptance(draft, p)):
        if coins[j] >= chance:
            q = None if draft.probs is None else draft.probs[j]
            return Verdict(j, draw(residual(p[j], q, draft.tokens[j]), quantiles[j]))
    n = len(draft.tokens)
    return Verdict(n, draw(p[n], quantiles[n]))


def acceptance(draft: Draft, p: Tensor) -> list[float]:
    """min(1, p(x_j) / q(x_j)) for each drafted token, given that those before it stood."""
    n = len(draft.tokens)
    if n == 0:
        return []
    x = torch.tensor(draft.tokens, device=p.device)[:, None]
    chance = p[:n].gather(1, x)[:, 0]
    if draft.probs is not None:
        chance = chance / draft.probs.gather(1, x)[:, 0]
    return chance.clamp(max=1.0).tolist()


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """The distribution (unnormalised) of the token that replaces a rejected draft: (p - q)+."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp(min=0.0)
    # Where p = q nothing is rejected in exact arithmetic; rounding may, and then p is all there is.
    return rest if float(rest.sum()) > 0.0 else p
