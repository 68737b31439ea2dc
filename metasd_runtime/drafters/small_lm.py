"""A small language model of its own that borrows the target's embeddings and output head.

A language model's embeddings are most of its weights when it is small. This one keeps matrices
between the target's width and its own instead: tokens enter as the target's embeddings times one,
and leave through another and the target's output head, cut to the draft vocabulary. It reads text,
not hidden states, so it drafts like any other language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from metasd_bandits import checks
from metasd_runtime.drafters.catch_up import CacheStrategy
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.model.target import Target

__all__ = ["SmallShape", "small_language_model"]

_HEAD = 64


@dataclass(frozen=True)
class SmallShape:
    """Everything about a small language model but its weights.

    Attributes
    ----------
    hidden : int
        The target's width.
    width, depth : int
        The model's own width and its layers.
    heads, kv_heads, head_dim, intermediate : int
        As in Llama's layers.
    eps, theta : float
        Of the norms, and the base of the rotary angles.
    context : int
        Most tokens it reads, the target's.
    """

    hidden: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float
    context: int

    @classmethod
    def of(cls, config: Any, width: int | None, depth: int) -> SmallShape:
        """A model for a target of this config: of its width (None), or a narrower one.

        Raises
        ------
        ConfigError
            If the width is no multiple of 64 or exceeds the target's, or the depth the target's.
        """
        text = config.get_text_config(decoder=True)
        hidden, rope = text.hidden_size, getattr(text, "rope_parameters", None) or {}
        checks.integer("language_model.depth", depth, 1, text.num_hidden_layers)
        heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        intermediate = text.intermediate_size
        if width is not None and width != hidden:
            checks.integer("language_model.width", width, _HEAD, hidden)
            if width % _HEAD:
                raise checks.ConfigError(
                    f"language_model.width={width} is no multiple of {_HEAD}, the width of a head; "
                    f"give {width // _HEAD * _HEAD}"
                )
            heads = kv_heads = width // _HEAD
            head_dim, intermediate = _HEAD, 3 * width
        return cls(
            hidden=hidden,
            width=hidden if width is None else width,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            eps=text.rms_norm_eps,
            theta=float(rope.get("rope_theta", 10_000.0)),
            context=text.max_position_embeddings,
        )

    def config(self) -> LlamaConfig:
        """Llama's, of one token: the embeddings are put in afterwards."""
        return LlamaConfig(
            vocab_size=1,
            hidden_size=self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            rms_norm_eps=self.eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            max_position_embeddings=self.context,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Each weight's name and shape: the layers as Llama names them, and the borrowing ones."""
        with torch.device("meta"):
            body = LlamaModel(self.config())
        return {
            "embed": (self.width, self.hidden),
            "output": (self.hidden, self.width),
            **{k: tuple(v.shape) for k, v in body.named_parameters() if "embed_tokens" not in k},
        }


class _ReducedHead(nn.Module):
    """An output head that gives logits to the draft vocabulary alone."""

    rows: Tensor
    tokens: Tensor

    def __init__(self, rows: Tensor, tokens: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("tokens", tokens)
        self.out_features = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        logits = x.new_full((*x.shape[:-1], self.out_features), float("-inf"))
        logits[..., self.tokens] = nn.functional.linear(x, self.rows)
        return logits


@torch.inference_mode()
def small_language_model(
    shape: SmallShape,
    weights: Mapping[str, Tensor],
    vocabulary: Tensor,
    target: Target,
    name: str = "lm",
    cache: str | CacheStrategy = "recompute",
) -> LanguageModel:
    """The drafter of a small language model.

    Parameters
    ----------
    shape : SmallShape
    weights : mapping of str to tensor
        By the names of `SmallShape.sizes`.
    vocabulary : (V,) int64
        The tokens it can draft.
    target : Target
        Lends its embeddings and the rows of its output head.
    name, cache
        As of `LanguageModel`.
    """
    embeddings = cast(Tensor, target.model.get_input_embeddings().weight).float()
    output = cast(Tensor, target.model.get_output_embeddings().weight)
    tokens = vocabulary.to(target.device)
    model: Any = LlamaForCausalLM(shape.config())
    body = {k: v for k, v in weights.items() if k not in ("embed", "output")}
    model.model.load_state_dict(body, strict=False)
    embed, out = (weights[k].float().to(target.device) for k in ("embed", "output"))
    model.model.embed_tokens = nn.Embedding.from_pretrained(embeddings @ embed.T)
    model.lm_head = _ReducedHead(output[tokens].float() @ out, tokens, target.vocab_size)
    model.config.vocab_size = target.vocab_size
    model = model.to(target.device, target.model.dtype).eval().requires_grad_(False)
    return LanguageModel(model, target.vocab_size, name, cache)
