"""The EAGLE head: its shape, its weights, and the small functions it is made of.

A head reads, for each token that stands, the target's hidden states *before* it (several layers,
each normalised) and its embedding, fuses them to one vector of the target's width, and sends that
through one decoder layer (EAGLE: Li et al. 2024; several layers fused: EAGLE-3, 2025). The
target's own output head, cut to the tokens that occur in practice, turns the result into a
distribution. Beyond the text, where the target has no hidden states yet, the head's own output
stands in for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metasd_bandits import checks

__all__ = ["MATRICES", "NORMS", "EagleShape", "normalise", "rotary_tables"]

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
