"""What a call of generate gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_bandits import Trace
from metasd_runtime.decoding.scores import Scores
from metasd_runtime.decoding.stopping import Finish
from metasd_runtime.generation.statistics import Statistics

__all__ = ["Interrupted", "Output", "pad_rows", "stack_scores"]


@dataclass(frozen=True)
class Output:
    """What a call of `MetaSD.generate` made.

    Attributes
    ----------
    sequences : (rows, length) int64
        Prompt and output, one row for each of ``num_return_sequences``; a shorter row is filled
        up with the padding token.
    trace : Trace
        Header and rounds.
    statistics : Statistics
        Per arm and in all.
    finish : Finish
        Why the (first) text ended.
    prompt_length : int
    finishes : tuple of Finish
        Why each row ended.
    lengths : tuple of int
        Emitted tokens of each row.
    scores, logits : tuple of (rows, vocabulary) tensors, optional
        With ``output_scores`` and ``output_logits``: for each emitted token the target's scores
        after the user's processors, and its raw logits. Rows that have ended hold zeros.
    logprobs, raw_logprobs : (rows, new tokens) float32, optional
        With ``output_logprobs``: log-probability of each emitted token under those scores, and
        under the raw logits: the target's own, whoever drafted it. Rows that have ended hold NaN.
    """

    sequences: Tensor
    trace: Trace
    statistics: Statistics
    finish: Finish
    prompt_length: int
    finishes: tuple[Finish, ...]
    lengths: tuple[int, ...]
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The (first) row's emitted tokens, without what fills it up."""
        end = self.prompt_length + self.lengths[0]
        return self.sequences[0, self.prompt_length : end].tolist()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in mid-generation; ``output`` holds what was made so far."""

    def __init__(self, output: Output) -> None:
        super().__init__("generation was interrupted")
        self.output = output


def pad_rows(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> Tensor:
    """Rows of different lengths as one tensor, filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)


def stack_scores(kept: Sequence[Scores]) -> dict[str, tuple[Tensor, ...] | Tensor | None]:
    """What the rows kept, in the shapes of `Output`."""
    return {
        "scores": _steps([row.scores for row in kept]),
        "logits": _steps([row.logits for row in kept]),
        "logprobs": _table([row.logprobs for row in kept]),
        "raw_logprobs": _table([row.raw_logprobs for row in kept]),
    }


def _steps(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...] | None:
    if not any(rows):
        return None
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    longest = max(map(len, rows))
    return tuple(
        torch.stack([row[step] if step < len(row) else blank for row in rows])
        for step in range(longest)
    )


def _table(rows: Sequence[Sequence[float]]) -> Tensor | None:
    if not any(rows):
        return None
    longest = max(map(len, rows))
    nan = float("nan")
    return torch.tensor([[*row, *[nan] * (longest - len(row))] for row in rows])
