"""Drafting token by token for several rows of a batch in one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_runtime.decoding.drafter import Ask, Draft, DrafterUnavailableError, RowsDrafter
from metasd_runtime.drafters.catch_up import CacheStrategy, Reading
from metasd_runtime.model.ragged import RaggedModel

__all__ = ["EarlyExitRows", "LanguageModelRows", "fit", "refuse_beyond"]

_SMALL_DEBT = 16  # tokens that are read together with the other rows', padded to the widest


class EarlyExitRows(RowsDrafter):
    """Early exit for several rows in one forward, in the storage of the target's rows."""

    def __init__(self, name: str, model: PreTrainedModel, target: RaggedModel) -> None:
        self.name = name
        self._exit = RaggedModel(model, target.storage.n_slots, target.storage)

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

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        vocab_size: int,
        cache: CacheStrategy,
        n_slots: int,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._lm = RaggedModel(model, n_slots)
        self._readings = [Reading(cache) for _ in range(n_slots)]
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


def refuse_beyond(limit: int | None, length: int) -> None:
    """Refuse to draft past a drafter's context."""
    if limit is not None and length > limit:
        raise DrafterUnavailableError(
            f"the text and the draft have {length} tokens and its context ends at {limit}; "
            "cache=streaming would show it a window"
        )


def fit(logits: Tensor, width: int) -> Tensor:
    """Logits over the target's vocabulary: cut, or padded with tokens that are never drafted."""
    if logits.shape[-1] >= width:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
