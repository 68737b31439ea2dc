"""What a round was worth: its block efficiency, its block divergence, its step, as one record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_bandits import Decision, Round
from metasd_bandits.round import Node
from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.verify import Verdict, acceptance, residual

__all__ = ["Timing", "block_divergence", "score"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one round, and of a plain decoding step to measure them by."""

    draft: float
    verify: float
    plain_step: float


def block_divergence(draft: Draft, scores: Tensor, path: Sequence[int]) -> float:
    """r_BD: the mean over drafted positions of 1 - TV(p_j, q_j) = sum over x of min(p_j, q_j).

    Positions behind the first rejection count too. For a one-hot q it is p(token). Of a tree, it
    is the mean chance that one of the siblings is accepted, at each depth along `path` and, behind
    the first rejection, along first children; 0 where the tree is deeper elsewhere
    (docs/method.md).
    """
    n = draft.depth
    if n == 0:
        return 0.0
    if draft.parents is not None:
        if draft.probs is not None:
            draft = Draft(draft.tokens, draft.probs.to(scores.device), parents=draft.parents)
        return _divergence_along(draft, scores, path) / n
    p = scores[:n].softmax(-1)
    if draft.probs is None:
        x = torch.tensor(draft.tokens, device=p.device)[:, None]
        return float(p.gather(1, x).mean())
    q = draft.probs.to(p.device)
    return min(1.0, float(torch.minimum(p, q.to(p.dtype), out=p).sum()) / n)


def _divergence_along(draft: Draft, scores: Tensor, path: Sequence[int]) -> float:
    """Sum over depths of the chance that a sibling is accepted."""
    total, here = 0.0, [-1]
    for depth in range(draft.depth):
        siblings = draft.children(here)
        if not siblings:
            break
        total += _chance(draft, siblings, scores[here[0] + 1].softmax(-1))
        here = draft.same(path[depth] if depth < len(path) else siblings[0], siblings)
    return total


def _chance(draft: Draft, siblings: Sequence[int], p: Tensor) -> float:
    """That one of them is accepted, given those before the last and averaged over the last."""
    if draft.probs is None:  # each has what is left of p(token): together, no more than their sum
        return min(1.0, float(p[[*{draft.tokens[node] for node in siblings}]].sum()))
    missed = 1.0
    *others, last = siblings
    for node in others:
        missed *= 1.0 - acceptance(draft, node, p)
        if missed <= 0.0:
            return 1.0
        p = residual(draft, node, p)
    return 1.0 - missed * (1.0 - min(1.0, float(torch.minimum(p, draft.probs[last]).sum())))


def score(
    router: Router,
    decision: Decision,
    query: str,
    index: int,
    draft: Draft,
    scores: Tensor,
    verdict: Verdict,
    emitted: int,
    timing: Timing,
) -> Round:
    """The record of a round, with the reward the router's policy learns from.

    Accounting stops where the text does: a stop among the accepted drafts cuts what counts as
    accepted. The step a cost-aware policy sees is drafting and verifying; catching up after a
    switch is recorded, but it is the price of changing, not of the arm. Of a tree every node was
    drafted; its block efficiency is what was accepted of its depth.
    """
    depth = draft.depth
    accepted = min(verdict.accepted, emitted)
    round_ = Round(
        query=query,
        index=index,
        arm=decision.arm,
        drafted=len(draft.tokens),
        accepted=accepted,
        emitted=emitted,
        block_efficiency=accepted / depth if depth else 0.0,
        block_divergence=block_divergence(draft, scores, verdict.path),
        reward=0.0,
        propensity=decision.propensity,
        draft_seconds=timing.draft,
        verify_seconds=timing.verify,
        switch_seconds=draft.switch_seconds,
        owed=draft.owed,
        step=(timing.draft + timing.verify) / timing.plain_step,
        depth=0 if draft.parents is None else depth,
        nodes=_nodes(draft, verdict.path[:accepted], cut=emitted <= accepted),
    )
    return dataclasses.replace(round_, reward=router.reward(round_, router.draft_length))


def _nodes(draft: Draft, path: Sequence[int], cut: bool) -> tuple[Node, ...] | None:
    """The block's nodes with what became of them, where several drafters filled it.

    Of a text that a stop `cut` behind the path nobody knows how it would have gone on.
    """
    if not draft.owners or not draft.chances:
        return None
    stands = {-1, *path}
    known = stands - ({path[-1]} if cut and path else set())
    rows = zip(draft.tokens, draft.lineage, draft.owners, draft.chances, strict=True)
    return tuple(
        Node(token, parent, owners, chance, node in stands if parent in known else None)
        for node, (token, parent, owners, chance) in enumerate(rows)
    )
