"""The EAGLE head as it is trained: unrolled over its own predictions, as it will be used."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from metasd_runtime.drafters.eagle.head import (
    EagleShape,
    normalise,
    rotary_tables,
)
from metasd_runtime.training.corpus import Batch
from metasd_runtime.training.student import Student, Unrolled, weight_dict

__all__ = ["EagleModel"]


class EagleModel(Student):
    """The head with trainable weights in float32.

    Parameters
    ----------
    shape : EagleShape
    weights : dict of str to tensor
    embeddings : (vocabulary, hidden)
        The target's, not trained.
    """

    embeddings: Tensor

    def __init__(self, shape: EagleShape, weights: dict[str, Tensor], embeddings: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.hidden = shape.hidden
        self.w = weight_dict(weights)
        self.register_buffer("embeddings", embeddings, persistent=False)

    def forward(self, batch: Batch, depths: int) -> list[Unrolled]:
        """The outputs at draft positions 1 to `depths`.

        At depth s the head attends to true states up to s - 1 tokens back and, behind them, to
        its own chain of depths 2 to s: just what it sees when it drafts.
        """
        s = self.shape
        A, W = batch.answer.shape[1], batch.tokens.shape[1]
        states = normalise(batch.states.unflatten(-1, (len(s.layers), s.hidden)), s.eps).flatten(-2)
        embedded = linear(normalise(self.embeddings[batch.tokens], s.eps), self.w["embed"])
        x = linear(states, self.w["fuse"]) + embedded
        tables = rotary_tables(W, s.head_dim, s.theta)
        cos, sin = (table.to(x.device) for table in tables)
        keys, values = self._keys_values(x, cos, sin)
        cos, sin, embedded, x = cos[W - A :], sin[W - A :], embedded[:, W - A :], x[:, W - A :]
        column = torch.arange(W, device=x.device)
        chain: list[tuple[Tensor, Tensor]] = []
        outputs: list[Unrolled] = []
        out = x
        for depth in range(depths):
            if depth:
                out = pad(out[:, :-1], (0, 0, 1, 0))  # of the depth before, one token back
                x = linear(normalise(out, s.eps), self.w["chain"]) + embedded
                chain = [(_later(k), _later(v)) for k, v in chain]
                chain.append(self._keys_values(x, cos, sin))
            seen = column <= column[W - A :, None] - depth
            hidden = ~(seen & batch.valid[:, None])
            out = self._layer(x, (cos, sin), keys, values, hidden, chain)
            started, rows = batch.started(depth)
            outputs.append(Unrolled(out[started], rows))
        return outputs

    def logits(self, out: Tensor, head: Tensor) -> Tensor:
        """Over the tokens that can be drafted, float32."""
        normal = normalise(out, self.shape.eps) * self.w["norm"]
        return linear(normal.to(head.dtype), head).float()

    def _keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        normal = normalise(x, self.shape.eps) * self.w["attention_norm"]
        k, v = (self._heads(linear(normal, self.w[name])) for name in ("k", "v"))
        return _turn(k, cos, sin), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2).float()

    def _layer(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        hidden: Tensor,
        chain: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        s = self.shape
        A, group = x.shape[1], s.heads // s.kv_heads
        normal = normalise(x, s.eps) * self.w["attention_norm"]
        q = _turn(self._heads(linear(normal, self.w["q"])), *tables).unflatten(1, (-1, group))
        scores = (q.flatten(2, 3) @ keys.transpose(2, 3)).float().unflatten(2, (group, A))
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in chain]
        weights = (torch.cat([scores, *own], -1) * s.head_dim**-0.5).softmax(-1).nan_to_num()
        W = keys.shape[2]
        mixed = (weights[..., :W].flatten(2, 3) @ values).float().unflatten(2, (group, A))
        for i, (_, v) in enumerate(chain):
            mixed = mixed + weights[..., W + i : W + i + 1] * v[:, :, None]
        x = x + linear(mixed.flatten(1, 2).transpose(1, 2).flatten(2), self.w["o"])
        normal = normalise(x, s.eps) * self.w["feed_forward_norm"]
        inner = silu(linear(normal, self.w["gate"])) * linear(normal, self.w["up"])
        return x + linear(inner, self.w["down"])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _later(x: Tensor) -> Tensor:
    """(B, heads, A, width) moved one column on: what stood one token back."""
    return pad(x[:, :, :-1], (0, 0, 1, 0))
