"""What a round was worth: its block efficiency, its block divergence, its step, as one record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_bandits import Decision, Round
from metasd_runtime.draft import Draft
from metasd_runtime.router import Router
from metasd_runtime.verify import Verdict

__all__ = ["Timing", "block_divergence", "score"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one round, and of a plain decoding step to measure them by."""

    draft: float
    verify: float
    plain_step: float


def block_divergence(draft: Draft, scores: Tensor) -> float:
    """r_BD: the mean over drafted positions of 1 - TV(p_j, q_j) = sum over x of min(p_j, q_j).

    Positions behind the first rejection count too. For a one-hot q it is p(token).
    """
    n = len(draft.tokens)
    if n == 0:
        return 0.0
    p = scores[:n].softmax(-1)
    if draft.probs is None:
        x = torch.tensor(draft.tokens, device=p.device)[:, None]
        return float(p.gather(1, x).mean())
    q = draft.probs.to(p.device)
    return min(1.0, float(torch.minimum(p, q.to(p.dtype), out=p).sum()) / n)


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
    switch is recorded, but it is the price of changing, not of the arm.
    """
    drafted = len(draft.tokens)
    accepted = min(verdict.accepted, emitted)
    round_ = Round(
        query=query,
        index=index,
        arm=decision.arm,
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        block_efficiency=accepted / drafted if drafted else 0.0,
        block_divergence=block_divergence(draft, scores),
        reward=0.0,
        propensity=decision.propensity,
        draft_seconds=timing.draft,
        verify_seconds=timing.verify,
        switch_seconds=draft.switch_seconds,
        owed=draft.owed,
        step=(timing.draft + timing.verify) / timing.plain_step,
    )
    return dataclasses.replace(round_, reward=router.reward(round_, router.draft_length))
