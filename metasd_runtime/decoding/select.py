"""Selecting: the policy chooses an arm, whose drafter drafts, or is disabled if it cannot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from metasd_bandits import Decision
from metasd_runtime.decoding.drafter import Draft, draft_block, drawn_block
from metasd_runtime.decoding.router import Router
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["Selected", "select_and_draft"]


class Selected(NamedTuple):
    """A round's draft, whose it is, and the seconds drafting took.

    Attributes
    ----------
    decision : Decision
    draft : Draft
    seconds : float
    owners : sequence of int, optional
        The arm of each node, where all arms drafted.
    """

    decision: Decision
    draft: Draft
    seconds: float
    owners: Sequence[int] | None = None

    def credited(self, path: Sequence[int]) -> Decision:
        """The arm whose draft stands."""
        if self.owners is None or not path:
            return self.decision
        return self.decision._replace(arm=self.owners[path[-1]])


def select_and_draft(
    router: Router, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> Selected:
    """Select until a drafter delivers; one that raises or tells nonsense is disabled.

    What it had drawn by then stands as its draft. Ends, since "no draft" always delivers.
    """
    while True:
        begin = time.perf_counter()
        decision = router.select()
        drafter = router.drafters[decision.arm]
        try:
            draft, seconds = draft_block(drafter, tokens, n, sampling, vocab_size)
        except Exception as error:
            router.disable(decision.arm, error)
            draft, seconds = drawn_block(sampling, n), time.perf_counter() - begin
            if not draft.tokens:
                continue
        return Selected(decision, draft, seconds)
