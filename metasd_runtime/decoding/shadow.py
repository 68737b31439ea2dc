"""Shadow drafting: what would the other arms have earned in this round?

Every arm that was not chosen drafts too, and the target verifies its block and forgets it. The
record then carries every arm's reward (a full-information round), from which `hedge` learns and
replay answers exactly. Nothing of it reaches the output: shadow drafts and their verification use
random numbers independent of the decode's own, so the next arm's choice stays independent of the
numbers that tokens are still to be drawn with.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metasd_bandits import Decision, Round
from metasd_runtime.decoding.drafter import Draft, draft_block
from metasd_runtime.decoding.reward import Timing, score
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.verify import Verdict, verify
from metasd_runtime.model.target import Target

if TYPE_CHECKING:
    from metasd_runtime.decoding.loop import Query

__all__ = ["shadow_rounds", "with_every_arm"]

_SHADOW = 1  # this lane of random numbers, among those a query may open


def shadow_rounds(
    query: Query, target: Target, router: Router, chosen: int, n: int
) -> dict[int, Round]:
    """The round as every arm but the chosen one would have had it.

    Called while the target's cache holds all tokens but the last, and leaves it so. It costs one
    draft and one target forward for each arm.
    """
    rounds = {}
    for arm, drafter in enumerate(router.drafters):
        if arm == chosen or arm in router.disabled:
            continue
        lane = query.sampling.lane(_SHADOW, arm, len(query.tokens))
        try:
            draft, seconds = draft_block(drafter, query.tokens, n, lane, target.vocab_size)
        except Exception as error:
            router.disable(arm, error)
            continue
        rounds[arm] = _verified(query, target, router, arm, lane, draft, seconds)
    return rounds


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
    target: Target,
    router: Router,
    arm: int,
    lane: Sampling,
    draft: Draft,
    seconds: float,
) -> Round:
    tokens = query.tokens
    begin = time.perf_counter()
    logits = target.forward([tokens[-1], *draft.tokens], parents=draft.parents).logits
    target.rollback(1 + len(draft.tokens))
    scores = lane.scores(logits, tokens, draft.before)
    verdict = verify(draft, scores, len(tokens), lane)
    timing = Timing(seconds, time.perf_counter() - begin, query.plain_step)
    emitted = _emitted(draft, verdict, query.stopping.eos)
    decision = Decision(arm, math.nan)
    return score(router, decision, query.name, 0, draft, scores, verdict, emitted, timing)


def _emitted(draft: Draft, verdict: Verdict, eos: frozenset[int]) -> int:
    """Tokens the round would have emitted, up to an end-of-sequence token."""
    text = [*(draft.tokens[node] for node in verdict.path), verdict.token]
    return next((j + 1 for j, token in enumerate(text) if token in eos), len(text))
