"""EAGLE: a one-layer head on the target's hidden states, drafting one token after another."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from metasd_runtime.draft import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.drafters.draft_head import DraftHead
from metasd_runtime.drafters.eagle_head import (
    EagleShape,
    Matrix,
    normalise,
    quantise,
    rotary_tables,
)
from metasd_runtime.sampling import Sampling
from metasd_runtime.target import Target

__all__ = ["Eagle"]

_FIRST_CAPACITY = 512


class Eagle(Drafter):
    """Draft with a head that reads the target's hidden states at the tokens that stand.

    What it keeps of the text (keys and values, one pair a token) is computed from the target's
    hidden states alone; its own guesses are written behind them and simply overwritten, so there
    is nothing to roll back. While other drafters are chosen it only collects hidden states, and
    reads them all in one go when it is its turn.

    Parameters
    ----------
    shape : EagleShape
    weights : mapping of str to tensor
        By the names of `EagleShape.sizes`; kept in eight bits a weight.
    vocabulary : (V,) int64
        The tokens it can draft, besides those of the prompt.
    target : Target
        Lends its embeddings and the rows of its output head.
    name : str, default "eagle"
    head : DraftHead, optional
        Of that target and vocabulary, where several drafters share it.
    """

    def __init__(
        self,
        shape: EagleShape,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor,
        target: Target,
        name: str = "eagle",
        head: DraftHead | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.needs_features = shape.layers
        self._device = target.device
        self._context = target.max_length
        self._embeddings = cast(Tensor, target.model.get_input_embeddings().weight)
        self._head = DraftHead(target, vocabulary) if head is None else head
        self._install(weights)
        self._logits = torch.full((target.vocab_size,), float("-inf"), device=self._device)
        self._storage(_FIRST_CAPACITY)
        self._length = 0
        self._pending: list[Tensor] = []

    @torch.inference_mode()
    def _install(self, weights: Mapping[str, Tensor]) -> None:
        """Lay the weights out for drafting: what meets the same input is one matrix."""
        w = {name: weight.float() for name, weight in weights.items()}
        before, behind = w["attention_norm"], w["feed_forward_norm"]

        def matrix(weight: Tensor) -> Matrix:
            return Matrix(*quantise(weight), self._device)

        self._fuse = matrix(torch.cat([w["fuse"], w["embed"]], 1))
        self._chain = matrix(torch.cat([w["chain"], w["embed"]], 1))
        self._qkv = matrix(torch.cat([w["q"], w["k"], w["v"]]) * before)
        self._o = matrix(w["o"])
        self._gate_up = matrix(torch.cat([w["gate"], w["up"]]) * behind)
        self._down = matrix(w["down"])
        self._norm = w["norm"].to(self._device)

    def _storage(self, capacity: int) -> None:
        """Room for `capacity` pairs; what is there is kept."""
        s = self.shape
        old = getattr(self, "_kv", None)
        self._kv = torch.empty(2, s.kv_heads, capacity, s.head_dim, device=self._device)
        if old is not None:
            self._kv[:, :, : old.shape[2]] = old
        cos, sin = rotary_tables(capacity, s.head_dim, s.theta)
        self._cos, self._sin = cos.to(self._device), sin.to(self._device)

    def clone(self) -> Eagle:
        """Another over the same weights."""
        twin = copy.copy(self)
        twin._head = self._head.clone()  # another prompt, other tokens
        twin._kv, twin._logits = torch.empty_like(self._kv), self._logits.clone()
        twin.start(())
        return twin

    def start(self, tokens: Sequence[int]) -> None:
        self._length = 0
        self._pending = []
        self._head.start(tokens)
        self._logits.fill_(float("-inf"))

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        if features is not None and len(features):
            self._pending.append(features)

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        fresh = sum(len(block) for block in self._pending)
        if self._length + fresh != len(tokens) - 1:
            raise DrafterUnavailableError(
                f"it has the target's hidden states of {self._length + fresh} tokens and needs "
                f"those of {len(tokens) - 1}"
            )
        if self._context is not None and len(tokens) + n > self._context:
            raise DrafterUnavailableError(f"its context ends at {self._context} tokens")
        if len(tokens) < 2:  # nothing has a token before it yet
            return Draft()
        begin = time.perf_counter()
        owed = fresh - len(self._pending[-1])
        out = self._read(tokens, n)
        catching_up = (time.perf_counter() - begin) * owed / fresh
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        for j in range(n):
            if j:
                x = torch.cat([normalise(out, self.shape.eps), self._embed(drafted[-1:])], -1)
                out = self._layer(self._chain(x), self._length + j - 1)
            token, probs = sampling.propose(self._scores(out), text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows), owed, catching_up)

    def _read(self, tokens: Sequence[int], n: int) -> Tensor:
        """Take in the hidden states that have come; the head's output behind the last."""
        s = self.shape
        features = torch.cat(self._pending).view(-1, len(s.layers), s.hidden)
        states = normalise(features, s.eps).flatten(1)
        before, self._length = self._length, self._length + len(states)
        self._pending = []
        if self._length + n > self._kv.shape[2]:
            self._storage(2 * (self._length + n))
        embedded = self._embed(tokens[before + 1 : self._length + 1])
        return self._layer(self._fuse(torch.cat([states, embedded], -1)), before)

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor(tokens, device=self._device)
        return normalise(self._embeddings[ids], self.shape.eps)

    def _layer(self, x: Tensor, begin: int) -> Tensor:
        """The decoder layer: keys and values of all rows, the output of the last row alone.

        Parameters
        ----------
        x : (m, hidden)
            At pairs ``begin`` to ``begin + m - 1``; the last attends to all up to itself.
        """
        s, end = self.shape, begin + len(x)
        qkv = self._qkv(normalise(x, s.eps)).view(len(x), -1, s.head_dim)
        kv_end = s.heads + s.kv_heads
        turned = self._turn(qkv[:, :kv_end], begin, end)
        self._kv[0, :, begin:end] = turned[:, s.heads :].transpose(0, 1)
        self._kv[1, :, begin:end] = qkv[:, kv_end:].transpose(0, 1)
        q = turned[-1, : s.heads].view(s.kv_heads, -1, s.head_dim)
        keys, values = self._kv[0, :, :end], self._kv[1, :, :end]
        weights = (q @ keys.transpose(1, 2) * s.head_dim**-0.5).softmax(-1)
        x = x[-1:] + self._o((weights @ values).view(1, -1))
        gate, up = self._gate_up(normalise(x, s.eps)).chunk(2, -1)
        return x + self._down(torch.nn.functional.silu(gate) * up)

    def _turn(self, x: Tensor, begin: int, end: int) -> Tensor:
        cos, sin = self._cos[begin:end, None], self._sin[begin:end, None]
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def _scores(self, out: Tensor) -> Tensor:
        """Logits over the target's vocabulary; what the head cannot draft has none."""
        logits = self._head(normalise(out, self.shape.eps) * self._norm)
        self._logits.index_copy_(0, self._head.tokens, logits[0])
        return self._logits
