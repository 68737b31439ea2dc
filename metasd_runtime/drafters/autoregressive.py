"""Drafters over the rows of a batch: each row's drafter has its own state; some draft together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError, check_draft
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.catch_up import Reading
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.drafters.language_model import LanguageModel, fit, refuse_beyond
from metasd_runtime.drafters.merged import Merged
from metasd_runtime.model.ragged import RaggedModel, refuse_ragged

__all__ = ["Ask", "RowDrafter", "RowsDrafter", "draft_rows", "rows_of"]

_SMALL_DEBT = 16  # tokens that are read together with the other rows', padded to the widest


class Ask(NamedTuple):
    """One row's wish for a draft of at most n tokens behind `tokens`."""

    slot: int
    tokens: Sequence[int]
    n: int
    sampling: Sampling


class RowsDrafter(ABC):
    """One arm of the pool, for all rows of a batch.

    Attributes
    ----------
    name : str
    needs_features : tuple of int
        As for `Drafter`.
    """

    name: str
    needs_features: tuple[int, ...] = ()

    @abstractmethod
    def start(self, slot: int, tokens: Sequence[int]) -> None:
        """A query begins in a slot."""

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        """A draft for each row, or what kept the row's drafter from it; n is at least 1."""

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """A round ended in a slot; `tokens` is all that stands there now."""
        return

    def finish(self, slot: int) -> None:
        """The slot's query ended."""
        return


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


class Clones(RowsDrafter):
    """Any drafter: a clone for each slot, which draft one after the other."""

    def __init__(self, drafter: Drafter, n_slots: int) -> None:
        self.name = drafter.name
        self.needs_features = drafter.needs_features
        self._drafters = [drafter.clone() for _ in range(n_slots)]

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self._drafters[slot].start(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        drafts: list[Draft | Exception] = []
        for slot, tokens, n, sampling in asks:
            try:
                drafts.append(self._drafters[slot].propose(tokens, n, sampling))
            except Exception as error:
                drafts.append(error)
        return drafts

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self._drafters[slot].commit(tokens, features)


class EarlyExitRows(RowsDrafter):
    """Early exit for several rows in one forward, in the storage of the target's rows."""

    def __init__(self, drafter: EarlyExit, target: RaggedModel) -> None:
        self.name = drafter.name
        self._exit = RaggedModel(drafter.model, target.storage.n_slots, target.storage)

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        return

    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        limit, before = self._exit.max_length, list(self._exit.lengths)
        over = {
            ask.slot: DrafterUnavailableError(f"the target's context ends at {limit} tokens")
            for ask in asks
            if limit is not None and len(ask.tokens) + ask.n > limit
        }
        ready = [ask for ask in asks if ask.slot not in over]
        drafts: dict[int, Draft | Exception] = {}
        try:
            if ready:
                first = self._read([a.slot for a in ready], [[a.tokens[-1]] for a in ready])
                drafts = _draft_together(ready, first, self._read)
        finally:  # the target's storage: leave it as it was
            self._exit.lengths[:] = before
        return [over.get(ask.slot) or drafts[ask.slot] for ask in asks]

    def _read(self, slots: list[int], blocks: list[list[int]]) -> list[Tensor]:
        return [f.logits[-1] for f in self._exit.forward(slots, blocks, keep=1)]


class LanguageModelRows(RowsDrafter):
    """A language model that drafts for several rows in one forward, debts and all."""

    def __init__(self, drafter: LanguageModel, n_slots: int) -> None:
        self.name = drafter.name
        self.vocab_size = drafter.vocab_size
        self._lm = RaggedModel(drafter.lm.model, n_slots)
        self._readings = [Reading(drafter.cache) for _ in range(n_slots)]
        self._open = [False] * n_slots

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self.finish(slot)
        self._lm.storage.open(slot)
        self._open[slot] = True
        self._readings[slot].restart()

    def finish(self, slot: int) -> None:
        if self._open[slot]:
            self._lm.storage.close(slot)
            self._open[slot] = False

    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        unread: dict[int, list[int]] = {}
        over: dict[int, Exception] = {}
        for slot, tokens, n, _ in asks:
            reading = self._readings[slot]
            forget, unread[slot] = reading.plan(tokens, n)
            self._lm.rollback(slot, forget)
            try:
                refuse_beyond(self._lm.max_length, len(reading.tokens) + len(unread[slot]) + n)
            except DrafterUnavailableError as error:
                over[slot] = error
        ready = [ask for ask in asks if ask.slot not in over]
        drafts = self._draft(ready, unread) if ready else {}
        return [over.get(ask.slot) or drafts[ask.slot] for ask in asks]

    def _draft(
        self, asks: Sequence[Ask], unread: dict[int, list[int]]
    ) -> dict[int, Draft | Exception]:
        """Pay the debts, large ones row by row, small ones together; then draft."""
        begin = time.perf_counter()
        blocks = {ask.slot: self._prefill(ask.slot, unread[ask.slot]) for ask in asks}
        prefilled = time.perf_counter() - begin
        first = self._read([ask.slot for ask in asks], list(blocks.values()))
        read = time.perf_counter() - begin - prefilled
        debts = {ask.slot: self._readings[ask.slot].owed for ask in asks}
        small = sum(min(debts[slot], len(block) - 1) for slot, block in blocks.items())
        switching = prefilled + read * small / sum(map(len, blocks.values()))
        drafts = _draft_together(asks, first, self._read)
        for slot, draft in drafts.items():
            if isinstance(draft, Draft):
                draft.owed = debts[slot]
                draft.switch_seconds = switching * debts[slot] / max(1, sum(debts.values()))
        return drafts

    def _prefill(self, slot: int, unread: list[int]) -> list[int]:
        """Read a large debt, all but its last token; what is left goes with the other rows'."""
        if len(unread) <= _SMALL_DEBT:
            return unread
        self._lm.prefill(slot, unread[:-1])
        self._readings[slot].extend(unread[:-1])
        return unread[-1:]

    def _read(self, slots: list[int], blocks: list[list[int]]) -> list[Tensor]:
        forwards = self._lm.forward(slots, blocks, keep=1)
        for slot, block in zip(slots, blocks, strict=True):
            self._readings[slot].extend(block)
        return [fit(forward.logits[-1], self.vocab_size) for forward in forwards]

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self._lm.rollback(slot, self._readings[slot].end_round(tokens))


def _draft_together(
    asks: Sequence[Ask],
    logits: Sequence[Tensor],
    read: Callable[[list[int], list[list[int]]], Sequence[Tensor]],
) -> dict[int, Draft | Exception]:
    """Draft token by token for all rows at once; a row that breaks leaves the others to go on.

    Parameters
    ----------
    logits : sequence of (vocabulary,) tensors
        Each row's, behind its text.
    read : callable
        ``(slots, blocks) -> logits``: extends those rows by a token each.
    """
    blocks = {ask.slot: _Block(ask) for ask in asks}
    going = list(asks)
    while going:
        for ask, row in zip(going, logits, strict=True):
            blocks[ask.slot].extend(row)
        going = [ask for ask in going if blocks[ask.slot].goes_on()]
        if going:
            slots = [ask.slot for ask in going]
            logits = read(slots, [blocks[slot].text[-1:] for slot in slots])
    return {slot: block.draft() for slot, block in blocks.items()}


class _Block:
    """One row's draft as it grows."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.text, self.rows = list(ask.tokens), list[Tensor]()
        self.error: Exception | None = None
        self.confident = True

    def extend(self, logits: Tensor) -> None:
        try:
            token, probs = self.ask.sampling.propose(logits, self.text)
        except Exception as error:
            self.error = error
        else:
            self.text.append(token)
            self.rows.append(probs)
            self.confident = self.ask.sampling.confident(token, probs)

    def goes_on(self) -> bool:
        return self.error is None and self.confident and len(self.rows) < self.ask.n

    def draft(self) -> Draft | Exception:
        if self.error is not None:
            return self.error
        return Draft(self.text[len(self.ask.tokens) :], torch.stack(self.rows))


class MergedRows(RowsDrafter):
    """Blocks put together row by row, of drafters over the same rows; all rows learn together."""

    def __init__(self, drafter: Merged, target: RaggedModel) -> None:
        self.name = drafter.name
        self.needs_features = drafter.needs_features
        self._parts = [rows_of(part, target) for part in drafter.parts]
        self._rows = [
            drafter.over([RowDrafter(part, slot) for part in self._parts])
            for slot in range(target.storage.n_slots)
        ]

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self._rows[slot].start(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | Exception]:
        return [self._rows[slot].propose(tokens, n, how) for slot, tokens, n, how in asks]

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        self._rows[slot].commit(tokens, features)

    def finish(self, slot: int) -> None:
        for part in self._parts:
            part.finish(slot)


def rows_of(drafter: Drafter, target: RaggedModel) -> RowsDrafter:
    """A drafter of the pool, for as many rows as the target has slots.

    Those that can read rows of different lengths in one forward draft for all their rows
    together; any other is cloned for each row.
    """
    if isinstance(drafter, Merged):
        return MergedRows(drafter, target)
    if isinstance(drafter, EarlyExit):
        return EarlyExitRows(drafter, target)
    if isinstance(drafter, LanguageModel):
        try:
            refuse_ragged(drafter.lm.model)
        except ValueError:
            return Clones(drafter, target.storage.n_slots)
        return LanguageModelRows(drafter, target.storage.n_slots)
    return Clones(drafter, target.storage.n_slots)


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
