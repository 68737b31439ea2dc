"""The EAGLE head: its shape, its weights, and products with them that are cheap for one row.

A head reads, for each token that stands, the target's hidden states *before* it (several layers,
each normalised) and its embedding, fuses them to one vector of the target's width, and sends that
through one decoder layer (EAGLE: Li et al. 2024; several layers fused: EAGLE-3, 2025). The
target's own output head, cut to the tokens that occur in practice, turns the result into a
distribution. Beyond the text, where the target has no hidden states yet, the head's own output
stands in for them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metasd_bandits import checks

__all__ = ["MATRICES", "NORMS", "EagleShape", "Matrix", "normalise", "quantise", "rotary_tables"]

# fuse: hidden states -> width; embed: token -> width; chain: the head's own output -> width.
MATRICES = ("fuse", "embed", "chain", "q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attention_norm", "feed_forward_norm", "norm")


@dataclass(frozen=True)
class EagleShape:
    """Everything about a head but its weights.

    Attributes
    ----------
    layers : tuple of int
        The target's hidden states it reads, counted as `transformers` does: behind that many
        layers, the last behind the final norm as well.
    hidden, heads, kv_heads, head_dim, intermediate : int
        As in the target's layers.
    eps, theta : float
        Of the norms, and the base of the rotary angles.
    """

    layers: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: Any, layers: tuple[int, ...]) -> EagleShape:
        """The shape that fits a Llama-like target.

        Raises
        ------
        ConfigError
            If `layers` are not among the target's hidden states.
        """
        text = config.get_text_config(decoder=True)
        for layer in layers:
            checks.integer("head.layers", layer, 1, text.num_hidden_layers)
        rope = getattr(text, "rope_parameters", None) or {}
        heads = text.num_attention_heads
        return cls(
            layers=tuple(layers),
            hidden=text.hidden_size,
            heads=heads,
            kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate=text.intermediate_size,
            eps=text.rms_norm_eps,
            theta=float(rope.get("rope_theta", 10_000.0)),
        )

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Each weight's name and shape."""
        H, Q, K = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.intermediate
        return {
            "fuse": (H, H * len(self.layers)),
            "embed": (H, H),
            "chain": (H, H),
            "q": (Q, H),
            "k": (K, H),
            "v": (K, H),
            "o": (H, Q),
            "gate": (inner, H),
            "up": (inner, H),
            "down": (H, inner),
            **dict.fromkeys(NORMS, (H,)),
        }


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


def stacked(weights: Mapping[str, Tensor], names: list[str], dim: int) -> Tensor:
    """Several matrices as one, side by side (1) or one over the other (0)."""
    return torch.cat([weights[name].float() for name in names], dim)


def normalise(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation of the last dimension, in float32, without a gain."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 .. length - 1, (length, head_dim), always float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()
