"""Drafting for the rows of a batch: each row's view of a drafter, and its checked drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from metasd_runtime.decoding.drafter import Ask, Draft, Drafter, RowsDrafter, check_draft
from metasd_runtime.decoding.sampling import Sampling

__all__ = ["RowDrafter", "draft_rows"]


class RowDrafter(Drafter):
    """One row of a `RowsDrafter`, as a router knows its drafters."""

    def __init__(self, rows: RowsDrafter, slot: int) -> None:
        self.name = rows.name
        self.needs_features = rows.needs_features
        self._rows, self._slot = rows, slot

    def start(self, tokens: Sequence[int]) -> None:
        self._rows.start(self._slot, tokens)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        [draft] = self._rows.propose([Ask(self._slot, tokens, n, sampling)])
        if isinstance(draft, Exception):
            raise draft
        return draft

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._rows.commit(self._slot, tokens, features)


def draft_rows(
    drafter: RowsDrafter, asks: Sequence[Ask], vocab_size: int
) -> list[tuple[Draft | Exception, float]]:
    """Let a drafter propose for several rows, and refuse what would not stay lossless.

    Returns
    -------
    list of (Draft or Exception, float)
        For each row, with its share of the seconds spent drafting, catching up not counted.
    """
    if not asks:
        return []
    begin = time.perf_counter()
    for ask in asks:
        ask.sampling.begin_block(len(ask.tokens))
    wanted = [ask for ask in asks if ask.n > 0]
    try:
        proposed = drafter.propose(wanted) if wanted else []
    except Exception as error:
        proposed = [error] * len(wanted)
    by_slot = {ask.slot: draft for ask, draft in zip(wanted, proposed, strict=True)}
    drafts = [_checked(by_slot.get(ask.slot, Draft()), ask, vocab_size) for ask in asks]
    switching = sum(draft.switch_seconds for draft in drafts if isinstance(draft, Draft))
    share = max(0.0, time.perf_counter() - begin - switching) / len(asks)
    return [(draft, share) for draft in drafts]


def _checked(draft: Draft | Exception, ask: Ask, vocab_size: int) -> Draft | Exception:
    if isinstance(draft, Exception):
        return draft
    try:
        check_draft(draft, ask.n, vocab_size, drawn=ask.sampling.do_sample)
    except Exception as error:
        return error
    return draft
