"""Shadow drafting: what would the other arms have earned in this round?

Every arm that was not chosen drafts too, and the target verifies its block and forgets it. The
record then carries every arm's reward (a full-information round), from which `hedge` learns and
replay answers exactly. Where the user's code processes the scores, what it said of the texts that
the round itself reached is known and holds for every arm; it is asked about no others. Nothing of
this reaches the output: shadow drafts and their verification use random numbers independent of the
decode's own, so the next arm's choice stays independent of the numbers that tokens are still to be
drawn with.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from metasd_bandits import Decision, Round
from metasd_runtime.decoding.drafter import Draft, draft_block
from metasd_runtime.decoding.reward import Timing, score
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.verify import Verdict, verify
from metasd_runtime.model.target import Target

if TYPE_CHECKING:
    from metasd_runtime.decoding.loop import Query

__all__ = ["Shadow", "shadow_drafts", "shadow_rounds", "with_every_arm"]

_SHADOW = 1  # this lane of random numbers, among those a query may open


class Shadow(NamedTuple):
    """An arm's draft that is not used, and what the target makes of it.

    Attributes
    ----------
    draft : Draft
        n tokens.
    logits : (n + 1, vocabulary)
    lane : Sampling
        Its random numbers.
    draft_seconds, forward_seconds : float
    """

    draft: Draft
    logits: Tensor
    lane: Sampling
    draft_seconds: float
    forward_seconds: float


def shadow_drafts(
    query: Query, target: Target, router: Router, chosen: int, n: int
) -> dict[int, Shadow]:
    """Drafts of every arm but the chosen one, read by the target.

    Called while the target's cache holds all tokens but the last, and leaves it so. It costs one
    draft and one target forward for each arm.
    """
    shadows = {}
    for arm, drafter in enumerate(router.drafters):
        if arm == chosen or arm in router.disabled:
            continue
        lane = query.sampling.lane(_SHADOW, arm, len(query.tokens))
        try:
            draft, seconds = draft_block(drafter, query.tokens, n, lane, target.vocab_size)
        except Exception as error:
            router.disable(arm, error)
            continue
        begin = time.perf_counter()
        block = [query.tokens[-1], *draft.tokens]
        logits = target.forward(block, parents=draft.parents).logits
        target.rollback(len(block))
        shadows[arm] = Shadow(draft, logits, lane, seconds, time.perf_counter() - begin)
    return shadows


def shadow_rounds(
    query: Query,
    router: Router,
    shadows: Mapping[int, Shadow],
    known: Mapping[tuple[int, ...], Tensor],
) -> dict[int, Round]:
    """The round as each of these arms would have had it; the text is as it was before the round.

    `known` are the scores that the round found under the user's code, by the tokens it had drafted
    (`metasd_runtime.decoding.judged.Judged.known`).
    """
    return {arm: _verified(query, router, arm, s, known) for arm, s in shadows.items()}


def with_every_arm(round_: Round, others: Mapping[int, Round], router: Router) -> Round:
    """The round with what every arm would have earned, emitted and cost.

    NaN, 0 and NaN for an arm that could not serve.
    """
    rounds = {**others, round_.arm: round_}
    each = [rounds.get(arm) for arm in range(len(router.arms))]
    return dataclasses.replace(
        round_,
        rewards=tuple(math.nan if r is None else r.reward for r in each),
        tokens=tuple(0 if r is None else r.emitted for r in each),
        steps=tuple(math.nan if r is None else r.step for r in each),
    )


def _verified(
    query: Query,
    router: Router,
    arm: int,
    shadow: Shadow,
    known: Mapping[tuple[int, ...], Tensor],
) -> Round:
    tokens, draft, lane = query.tokens, shadow.draft, shadow.lane
    begin = time.perf_counter()
    scores = lane.scores(shadow.logits, tokens, draft.before)
    if known:
        before = [tuple(draft.before(row)) for row in range(len(scores))]
        scores = torch.stack([known.get(t, s) for t, s in zip(before, scores, strict=True)])
    verdict = verify(draft, scores, len(tokens), lane)
    verify_seconds = shadow.forward_seconds + time.perf_counter() - begin
    timing = Timing(shadow.draft_seconds, verify_seconds, query.plain_step)
    emitted = _emitted(draft, verdict, query.stopping.eos)
    decision = Decision(arm, math.nan)
    return score(router, decision, query.name, 0, draft, scores, verdict, emitted, timing)


def _emitted(draft: Draft, verdict: Verdict, eos: frozenset[int]) -> int:
    """Tokens the round would have emitted, up to an end-of-sequence token."""
    text = verdict.tokens(draft)
    return next((j + 1 for j, token in enumerate(text) if token in eos), len(text))
