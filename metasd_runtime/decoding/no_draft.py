"""No draft at all: plain decoding as an arm, so that speculation never does lasting harm."""

from __future__ import annotations

from collections.abc import Sequence

from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["NoDraft"]


class NoDraft(Drafter):
    """Drafts nothing; the round is one step of plain decoding."""

    name = "none"

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        return Draft()
