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
from metasd_runtime.draft import Draft, draft_block
from metasd_runtime.reward import Timing, score
from metasd_runtime.router import Router
from metasd_runtime.target import Target
from metasd_runtime.verify import Verdict, verify

if TYPE_CHECKING:
    from metasd_runtime.decoder import Query

__all__ = ["every_reward", "shadow_rewards"]

_SHADOW = 1  # this lane of random numbers, among those a query may open


def shadow_rewards(
    query: Query, target: Target, router: Router, chosen: int, n: int
) -> dict[int, float]:
    """The reward of every arm but the chosen one, had it been used in this round.

    Called while the target's cache holds all tokens but the last, and leaves it so. It costs one
    draft and one target forward for each arm that drafts anything.
    """
    rewards = {}
    for arm, drafter in enumerate(router.drafters):
        if arm == chosen or arm in router.disabled:
            continue
        lane = query.sampling.lane(_SHADOW, arm, len(query.tokens))
        try:
            draft, seconds = draft_block(drafter, query.tokens, n, lane, target.vocab_size)
        except Exception as error:
            router.disable(arm, error)
            continue
        rewards[arm] = _reward(query, target, router, arm, draft, seconds)
    return rewards


def every_reward(round_: Round, others: Mapping[int, float], router: Router) -> Round:
    """The round with every arm's reward; a disabled arm could not have earned any."""
    others = {**others, round_.arm: round_.reward}
    rewards = tuple(others.get(arm, 0.0) for arm in range(len(router.arms)))
    return dataclasses.replace(round_, rewards=rewards)


def _reward(
    query: Query, target: Target, router: Router, arm: int, draft: Draft, seconds: float
) -> float:
    tokens = query.tokens
    lane = query.sampling.lane(_SHADOW, arm, len(tokens))
    begin = time.perf_counter()
    logits = target.forward([tokens[-1], *draft.tokens]).logits
    target.rollback(1 + len(draft.tokens))
    scores = lane.scores(logits, tokens, draft.tokens)
    verdict = verify(draft, scores, len(tokens), lane)
    timing = Timing(seconds, time.perf_counter() - begin, query.plain_step)
    emitted = _emitted(draft, verdict, query.stopping.eos)
    decision = Decision(arm, math.nan)
    return score(router, decision, "", 0, draft, scores, verdict, emitted, timing).reward


def _emitted(draft: Draft, verdict: Verdict, eos: frozenset[int]) -> int:
    """Tokens the round would have emitted, up to an end-of-sequence token."""
    text = [*draft.tokens[: verdict.accepted], verdict.token]
    return next((j + 1 for j, token in enumerate(text) if token in eos), len(text))
