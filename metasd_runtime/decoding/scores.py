"""Keeping the scores of emitted tokens, and their log-probabilities, where a call asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Scores"]


class Scores:
    """The target's scores at each emitted token of one row; by default nothing is kept.

    Parameters
    ----------
    prompt_length : int
    scores, logits, logprobs : bool
        What to keep: the scores after the user's processors, the target's raw logits, the
        log-probabilities of the emitted tokens under both.

    Attributes
    ----------
    scores, logits : list of (vocabulary,) tensors
    logprobs : list of float
        Of each emitted token under the processed scores: the distribution it was drawn from
        (greedy decoding draws from none; it is the softmax of the same scores).
    raw_logprobs : list of float
        Of each emitted token under the target's raw logits. Never the drafter's, and never 0 for
        having been accepted.
    """

    def __init__(
        self,
        prompt_length: int = 0,
        *,
        scores: bool = False,
        logits: bool = False,
        logprobs: bool = False,
    ) -> None:
        self._prompt_length = prompt_length
        self._wanted = (scores, logits, logprobs)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self._block: tuple[Tensor, Tensor] | None = None

    def see(self, logits: Tensor, scores: Tensor, rows: Sequence[int]) -> None:
        """A draft was verified with these; `rows` of them are for the tokens that stand."""
        if any(self._wanted):
            self._block = (logits[rows], scores[rows])

    def keep(self, emitted: Sequence[int]) -> None:
        """The block's first tokens were emitted."""
        if self._block is None:
            return
        logits, scores = (block[: len(emitted)] for block in self._block)
        keep_scores, keep_logits, keep_logprobs = self._wanted
        if keep_scores:
            self.scores += scores.clone()
        if keep_logits:
            self.logits += logits.clone()
        if keep_logprobs:
            self.logprobs += _of(emitted, scores)
            self.raw_logprobs += _of(emitted, logits)
        self._block = None

    def cut(self, n: int) -> None:
        """Forget all behind the first n emitted tokens."""
        del self.scores[n:], self.logits[n:], self.logprobs[n:], self.raw_logprobs[n:]
        self._block = None

    def so_far(self, length: int) -> tuple[Tensor, ...] | None:
        """The processed scores of the text's new tokens up to `length`, each (1, vocabulary)."""
        if not self._wanted[0]:
            return None
        rows = list(self.scores)
        if self._block is not None:
            rows += self._block[1][: length - self._prompt_length - len(rows)]
        return tuple(row[None] for row in rows)


def _of(tokens: Sequence[int], scores: Tensor) -> list[float]:
    x = torch.tensor([tokens], device=scores.device).T
    return scores.log_softmax(-1).gather(1, x)[:, 0].tolist()
