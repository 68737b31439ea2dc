"""Medusa's and BPD's heads as they are trained, and what they begin with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from metasd_runtime.drafters.parallel_heads import ParallelShape
from metasd_runtime.training.corpus import Batch, Text
from metasd_runtime.training.initialise import ridge
from metasd_runtime.training.student import Student, Unrolled, weight_dict

__all__ = ["ParallelModel", "initial_parallel"]


class ParallelModel(Student):
    """Parallel heads with trainable weights in float32.

    Parameters
    ----------
    shape : ParallelShape
    weights : dict of str to tensor
    """

    def __init__(self, shape: ParallelShape, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape: ParallelShape = shape
        self.hidden = shape.hidden
        self.w = weight_dict(weights)

    def forward(self, batch: Batch, depths: int) -> list[Unrolled]:
        A = batch.answer.shape[1]
        outputs = self._outputs(batch.states[:, -A:, -self.hidden :][batch.answer].float())
        unrolled = []
        for depth in range(min(depths, self.shape.positions)):
            _, rows = batch.started(depth)
            unrolled.append(Unrolled(outputs[rows - depth, depth], rows))
        return unrolled

    def _outputs(self, h: Tensor) -> Tensor:
        """(R, H) to (R, K, H)."""
        K = self.shape.positions
        inner = linear(h, self.w["up"])
        if self.shape.block == "medusa":
            block = silu(inner + self.w["bias"]).unflatten(1, (K, -1))
        else:
            down = self.w["down"].unflatten(0, (K, -1))
            block = torch.einsum("rki,khi->rkh", inner.relu().unflatten(1, (K, -1)), down)
        return h[:, None] + block


@torch.inference_mode()
def initial_parallel(shape: ParallelShape, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Weights to begin with.

    Medusa's are zero, as in the paper: every head begins as the target's own. BPD's begin as the
    ridge regression R_k of the state k tokens on from the present one, since
    R h = h + (R - I) (ReLU(h) - ReLU(-h)).
    """
    if shape.block == "medusa":
        return {name: torch.zeros(size) for name, size in shape.sizes().items()}
    eye = torch.eye(shape.hidden)
    downs = []
    for distance in range(1, shape.positions + 1):
        now, then = _pairs(texts, shape.hidden, distance)
        change = ridge(now, then) - eye
        downs.append(torch.cat([change, -change], 1))
    up = torch.cat([eye, -eye]).repeat(shape.positions, 1)
    return {"up": up, "down": torch.cat(downs)}


def _pairs(texts: Sequence[Text], hidden: int, distance: int) -> tuple[Tensor, Tensor]:
    """The target's last states along the answers, and those `distance` tokens on."""
    now, then = [], []
    for text in texts:
        states = text.states()[0][-text.answered - distance :, -hidden:].float()
        now.append(states[:-distance])
        then.append(states[distance:])
    return torch.cat(now), torch.cat(then)
