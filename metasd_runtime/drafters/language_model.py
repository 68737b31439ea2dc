"""A smaller causal language model with the target's tokenizer, as in the first papers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_runtime.decoding.drafter import Draft, Drafter, RowsDrafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.autoregressive import LanguageModelRows, fit, refuse_beyond
from metasd_runtime.drafters.catch_up import CacheStrategy, Reading, make_cache_strategy
from metasd_runtime.model.ragged import RaggedModel, refuse_ragged
from metasd_runtime.model.target import CachedModel

__all__ = ["READ_CHUNK", "LanguageModel"]

READ_CHUNK = 512


class LanguageModel(Drafter):
    """Draft token by token with a language model of its own cache.

    While other drafters are chosen it does nothing; chosen again, it first reads what it missed
    (its debt), or as much of it as its cache strategy says.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM whose token ids mean what the target's mean.
    vocab_size : int
        Width of the target's logits; the model's own are cut or padded to it (checkpoints of one
        family pad their vocabularies differently).
    name : str, default "lm"
    cache : {"recompute", "streaming", "lazy"} or CacheStrategy
        How debts are paid (`metasd_runtime.drafters.catch_up`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        name: str = "lm",
        cache: str | CacheStrategy = "recompute",
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.lm = CachedModel(model)
        self.cache = make_cache_strategy(cache).fit(self.lm.max_length)
        self._reading = Reading(self.cache)

    def clone(self) -> LanguageModel:
        return LanguageModel(self.lm.model, self.vocab_size, self.name, self.cache)

    def for_rows(self, target: RaggedModel) -> RowsDrafter:
        """All rows in one forward, where the model can read rows of different lengths."""
        n_slots = target.storage.n_slots
        try:
            refuse_ragged(self.lm.model)
        except ValueError:
            return super().for_rows(target)
        return LanguageModelRows(self.name, self.lm.model, self.vocab_size, self.cache, n_slots)

    def start(self, tokens: Sequence[int]) -> None:
        self.lm.reset()
        self._reading.restart()

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        forget, unread = self._reading.plan(tokens, n)
        self.lm.rollback(forget)
        refuse_beyond(self.lm.max_length, len(self._reading.tokens) + len(unread) + n)
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        begin = time.perf_counter()
        logits = self._forward(unread)
        owed = self._reading.owed
        catching_up = (time.perf_counter() - begin) * owed / len(unread)
        for j in range(n):
            if j:
                logits = self._forward(drafted[-1:])
            token, probs = sampling.propose(logits, text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows), owed, catching_up)

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Keep of what was read the part that stands."""
        self.lm.rollback(self._reading.end_round(tokens))

    def _forward(self, tokens: list[int]) -> Tensor:
        for start in range(0, len(tokens), READ_CHUNK):
            chunk = tokens[start : start + READ_CHUNK]
            logits = self.lm.forward(chunk, keep=1).logits[-1]
            self._reading.extend(chunk)
        return fit(logits, self.vocab_size)
