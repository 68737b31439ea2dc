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
        self._logits = torch.full((1, target.vocab_size), float("-inf"), device=self._device)
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
        out = self._read(tokens, self._room(n))
        catching_up = (time.perf_counter() - begin) * owed / fresh
        draft = self._draft(out, tokens, n, sampling)
        draft.owed, draft.switch_seconds = owed, catching_up
        return draft

    def _room(self, n: int) -> int:
        """Pairs of its own guesses that may stand behind the text's."""
        return n

    def _draft(self, out: Tensor, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        """Draft behind the text, `out` being the head's output at its last pair."""
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        for j in range(n):
            if j:
                x = torch.cat([normalise(out, self.shape.eps), self._embed(drafted[-1:])], -1)
                out = self._layer(self._chain(x), self._length + j - 1)
            token, probs = sampling.propose(self._scattered(self._scores(out))[0], text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows))

    def _read(self, tokens: Sequence[int], room: int) -> Tensor:
        """Take in the hidden states that have come; the head's output behind the last."""
        s = self.shape
        features = torch.cat(self._pending).view(-1, len(s.layers), s.hidden)
        states = normalise(features, s.eps).flatten(1)
        before, self._length = self._length, self._length + len(states)
        self._pending = []
        if self._length + room > self._kv.shape[2]:
            self._storage(2 * (self._length + room))
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
        end = begin + len(x)
        q = self._take_in(x, begin, slice(begin, end))[-1:]
        return self._feed(x[-1:], self._attend(q, end))

    def _take_in(self, x: Tensor, begin: int, positions: slice) -> Tensor:
        """Write the rows' keys and values from place `begin` on; their queries."""
        s, kv_end = self.shape, self.shape.heads + self.shape.kv_heads
        qkv = self._qkv(normalise(x, s.eps)).view(len(x), -1, s.head_dim)
        turned = self._turn(qkv[:, :kv_end], positions)
        end = begin + len(x)
        self._kv[0, :, begin:end] = turned[:, s.heads :].transpose(0, 1)
        self._kv[1, :, begin:end] = qkv[:, kv_end:].transpose(0, 1)
        return turned[:, : s.heads]

    def _attend(self, q: Tensor, end: int, hidden: Tensor | None = None) -> Tensor:
        """What (m, heads, head_dim) queries make of the pairs before `end`.

        `hidden` is (m, pairs) bool: which of the last pairs each query must not see.
        """
        s, m = self.shape, len(q)
        q = q.view(m, s.kv_heads, -1, s.head_dim).transpose(0, 1)
        q = q.reshape(s.kv_heads, -1, s.head_dim)
        keys, values = self._kv[0, :, :end], self._kv[1, :, :end]
        scores = q @ keys.transpose(1, 2) * s.head_dim**-0.5
        if hidden is not None:
            last = scores.view(s.kv_heads, m, -1, end)[..., -hidden.shape[1] :]
            last.masked_fill_(hidden[:, None], float("-inf"))
        mixed = (scores.softmax(-1) @ values).view(s.kv_heads, m, -1)
        return mixed.transpose(0, 1).reshape(m, -1)

    def _feed(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self._o(mixed)
        gate, up = self._gate_up(normalise(x, self.shape.eps)).chunk(2, -1)
        return x + self._down(torch.nn.functional.silu(gate) * up)

    def _turn(self, x: Tensor, positions: slice) -> Tensor:
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def _scores(self, out: Tensor) -> Tensor:
        """(m, n) logits of the tokens that can be drafted."""
        return self._head(normalise(out, self.shape.eps) * self._norm)

    def _scattered(self, logits: Tensor) -> Tensor:
        """The logits over the target's vocabulary; what the head cannot draft has none."""
        if len(logits) > len(self._logits):
            self._logits = self._logits[:1].expand(len(logits), -1).clone()
        return self._logits[: len(logits)].index_copy_(1, self._head.tokens, logits)
