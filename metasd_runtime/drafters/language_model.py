"""A smaller causal language model with the target's tokenizer, as in the first papers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_runtime.draft import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.sampling import Sampling
from metasd_runtime.target import CachedModel

__all__ = ["LanguageModel"]


class LanguageModel(Drafter):
    """Draft token by token with a language model of its own cache.

    While other drafters are chosen it does nothing; chosen again, it first reads what it missed
    (its debt), in one forward.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM whose token ids mean what the target's mean.
    vocab_size : int
        Width of the target's logits; the model's own are cut or padded to it (checkpoints of one
        family pad their vocabularies differently).
    name : str, default "lm"
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, name: str = "lm") -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._lm = CachedModel(model)
        self._read: list[int] = []
        self._committed = 0

    def start(self, tokens: Sequence[int]) -> None:
        self._lm.reset()
        self._read, self._committed = [], 0

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        limit = self._lm.max_length
        if limit is not None and len(tokens) + n > limit:
            raise DrafterUnavailableError(
                f"the text has {len(tokens)} tokens, its context ends at {limit}"
            )
        owed = list(tokens[len(self._read) :])
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        begin = time.perf_counter()
        logits = self._forward(owed)
        catching_up = (time.perf_counter() - begin) * (len(owed) - 1) / len(owed)
        for j in range(n):
            if j:
                logits = self._forward(drafted[-1:])
            token, probs = sampling.propose(logits, text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows), len(owed) - 1, catching_up)

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Keep of what was read the part that stands."""
        stands = min(self._committed, len(self._read))
        while stands < min(len(self._read), len(tokens)) and self._read[stands] == tokens[stands]:
            stands += 1
        self._lm.rollback(len(self._read) - stands)
        del self._read[stands:]
        self._committed = len(tokens)

    def _forward(self, tokens: list[int]) -> Tensor:
        logits = self._lm.forward(tokens, keep=1).logits[-1]
        self._read += tokens
        return _fit(logits, self.vocab_size)


def _fit(logits: Tensor, width: int) -> Tensor:
    """Logits over the target's vocabulary: cut, or padded with tokens that are never drafted."""
    if logits.shape[-1] >= width:
        return logits[..., :width]
    return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
