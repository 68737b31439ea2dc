"""Selecting: the policy chooses an arm, whose drafter drafts, or is disabled if it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from metasd_bandits import Decision
from metasd_runtime.draft import Draft, draft_block
from metasd_runtime.router import Router
from metasd_runtime.sampling import Sampling

__all__ = ["Selected", "select_and_draft"]


class Selected(NamedTuple):
    """The arm of a round, its draft, and the seconds drafting took."""

    decision: Decision
    draft: Draft
    seconds: float


def select_and_draft(
    router: Router, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> Selected:
    """Select until a drafter delivers; one that raises or tells nonsense is disabled.

    Ends, since "no draft" always delivers.
    """
    while True:
        decision = router.select()
        drafter = router.drafters[decision.arm]
        try:
            draft, seconds = draft_block(drafter, tokens, n, sampling, vocab_size)
        except Exception as error:
            router.disable(decision.arm, error)
        else:
            return Selected(decision, draft, seconds)
