"""What a drafter in training is to the loop that teaches it and to the evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from metasd_runtime.training.corpus import Batch

__all__ = ["Student", "Unrolled", "weight_dict"]


class Unrolled(NamedTuple):
    """A drafter's outputs at one draft position, for the answer tokens that have one there.

    Attributes
    ----------
    out : (R, hidden)
    rows : (R,) int64
        Which of the batch's answer tokens, in reading order, they predict.
    """

    out: Tensor
    rows: Tensor


class Student(nn.Module, ABC):
    """A drafter with trainable weights in float32.

    Attributes
    ----------
    shape : object
        Everything about it but its weights.
    hidden : int
        The target's width: that of its outputs, which the target's head turns into logits.
    w : nn.ParameterDict
        Its weights by name.
    drafts_prompt : bool
        Whether it can draft the prompt's tokens besides the draft vocabulary.
    """

    shape: Any
    hidden: int
    w: nn.ParameterDict
    drafts_prompt = True

    @abstractmethod
    def forward(self, batch: Batch, depths: int) -> list[Unrolled]:
        """The outputs at draft positions 1 to `depths`, fewer where it has fewer."""

    def logits(self, out: Tensor, head: Tensor) -> Tensor:
        """(R, V) float32: logits of the tokens whose rows of the target's head are given."""
        return nn.functional.linear(out.to(head.dtype), head).float()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights by name."""
        return {name: value.detach().clone() for name, value in self.w.items()}


def weight_dict(weights: Mapping[str, Tensor]) -> nn.ParameterDict:
    """Trainable float32 copies of weights."""
    return nn.ParameterDict(
        {name: nn.Parameter(value.detach().float().clone()) for name, value in weights.items()}
    )
