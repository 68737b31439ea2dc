"""Products with a head's eight-bit weights that are cheap for one row."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

__all__ = ["Matrix", "quantise"]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits a weight: rows of int8 and each row's scale, rounding to nearest."""
    scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


class Matrix:
    """A weight matrix in eight bits, used as it lies: a draft step is bound by memory.

    Parameters
    ----------
    weight : (out, in) int8
    scale : (out,)
        Of each row.
    device : torch.device

    Attributes
    ----------
    FEW : int
        Up to so many rows of a factor, a product reads the weights as they lie.
    """

    FEW = 8

    def __init__(self, weight: Tensor, scale: Tensor, device: torch.device) -> None:
        self.weight = weight.contiguous().to(device)
        self.scale = scale.float().to(device)
        self._scale16 = scale.to(device, torch.bfloat16)
        # PyTorch's own kernel for eight-bit weights: a third of the time of bfloat16 ones.
        self._kernel = getattr(torch, "_weight_int8pack_mm", None)
        if device.type != "cpu" or weight.shape[1] % 64 or weight.shape[0] % 64:
            self._kernel = None
        self._half = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
        self._dense = None if self._kernel is not None else self._floats()

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that a product with few rows reads."""
        return (self.weight, self._scale16) if self._dense is None else (self._dense,)

    def reading(self, *operands: Tensor) -> Matrix:
        """A twin that reads these instead, for tracing."""
        twin = copy.copy(self)
        if self._dense is None:
            twin.weight, twin._scale16 = operands
        else:
            (twin._dense,) = operands
        return twin

    def _floats(self) -> Tensor:
        return self.weight.float() * self.scale[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T for (m, in) float32; many rows are cheaper with the weights unpacked once.

        To bfloat16, which holds eight bits exactly, where the processor computes with it: the same
        rounding as the kernel's, a quarter of the time that floats take.
        """
        if self._kernel is not None and x.shape[0] <= self.FEW:
            product: Tensor = self._kernel(x.bfloat16(), self.weight, self._scale16)
            return product.float()
        if self._kernel is not None and self._half:
            product = torch.nn.functional.linear(x.bfloat16(), self.weight.bfloat16())
            return product.float() * self.scale
        weight = self._floats() if self._dense is None else self._dense
        return torch.nn.functional.linear(x, weight)
