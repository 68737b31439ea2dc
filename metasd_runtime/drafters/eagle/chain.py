"""EAGLE: a one-layer head on the target's hidden states, drafting one token after another."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.eagle.head import (
    EagleShape,
    normalise,
    rotary_tables,
)
from metasd_runtime.drafters.matrix import Matrix, quantise
from metasd_runtime.drafters.output_head import DraftHead
from metasd_runtime.model.target import Target

if TYPE_CHECKING:
    from metasd_runtime.drafters.eagle.compiled import CompiledStep

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

    Attributes
    ----------
    compiled : CompiledStep or None
        Takes the head's steps where it can (`metasd_runtime.drafters.eagle.compiled`).
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
        # Position by position, so that the part in use is one piece, whatever the capacity.
        empty = torch.empty(0, shape.kv_heads, shape.head_dim, device=self._device)
        self._keys = self._values = empty
        self._behind = empty, empty
        self._storage(_FIRST_CAPACITY)
        self.compiled: CompiledStep | None = None
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
        kept = self._keys, self._values
        self._keys, self._values = (x.new_empty(capacity, *x.shape[1:]) for x in kept)
        for new, old in zip((self._keys, self._values), kept, strict=True):
            new[: len(old)] = old
        cos, sin = rotary_tables(capacity, s.head_dim, s.theta)
        self._cos, self._sin = cos.to(self._device), sin.to(self._device)

    def clone(self) -> Eagle:
        """Another over the same weights."""
        twin = copy.copy(self)
        twin._head = self._head.clone()  # another prompt, other tokens
        twin._keys, twin._values = torch.empty_like(self._keys), torch.empty_like(self._values)
        twin._logits = self._logits.clone()
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
        owed = sum(len(block) for block in self._pending[:-1])
        out, logits = self._read(tokens, self._room(n))
        catching_up = (time.perf_counter() - begin) * owed / max(1, fresh)
        draft = self._draft(out, logits, tokens, n, sampling)
        draft.owed, draft.switch_seconds = owed, catching_up
        return draft

    def _room(self, n: int) -> int:
        """Pairs of its own guesses that may stand behind the text's."""
        return n

    def _draft(
        self, out: Tensor, logits: Tensor, tokens: Sequence[int], n: int, sampling: Sampling
    ) -> Draft:
        """Draft behind the text; `out` and `logits` are the head's at the text's last pair."""
        text, drafted, rows = list(tokens), list[int](), list[Tensor]()
        for place in range(self._length, self._length + n):
            if drafted:
                out, logits = self._step("chain", out, drafted[-1:], place - 1)
            token, probs = sampling.propose(self._scattered(logits)[0], text)
            text.append(token)
            drafted.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(drafted, torch.stack(rows))

    def _read(self, tokens: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
        """Take in the hidden states that have come; the head's output and logits behind them.

        None have where several arms of one head draft in a round.
        """
        before, fresh = self._length, self._pending
        self._length += sum(len(block) for block in fresh)
        self._pending = []
        if self._length + room > len(self._keys):
            self._storage(2 * (self._length + room))
        if fresh:
            ids = tokens[before + 1 : self._length + 1]
            self._behind = self._step("fuse", torch.cat(fresh), ids, before)
        return self._behind

    def _step(
        self, entry: str, states: Tensor, tokens: Sequence[int], begin: int
    ) -> tuple[Tensor, Tensor]:
        """Take in m pairs from place `begin` on; the output and the logits behind the last.

        Parameters
        ----------
        entry : {"fuse", "chain"}
            Whether the states are the target's or the head's own outputs.
        states : (m, entry's width)
        tokens : m ints
        begin : int
        """
        ids = torch.tensor(tokens, device=self._device)
        if self.compiled is not None and self.compiled.serves(entry, len(ids), begin):
            return self.compiled(self, entry, states, ids, begin)
        return self._eager_step(entry, states, ids, begin)

    def _eager_step(
        self, entry: str, states: Tensor, ids: Tensor, begin: int
    ) -> tuple[Tensor, Tensor]:
        out = self._layer(self._enter(entry, states, ids), begin)
        return out, self._scores(out)

    def _enter(self, entry: str, states: Tensor, ids: Tensor) -> Tensor:
        """(m, hidden): what the layer is given for m pairs of states and tokens."""
        s = self.shape
        parts = normalise(states.view(ids.shape[0], -1, s.hidden), s.eps).flatten(1)
        embedded = normalise(self._embeddings[ids], s.eps)
        matrix = self._fuse if entry == "fuse" else self._chain
        return matrix(torch.cat([parts, embedded], -1))

    def _layer(self, x: Tensor, begin: int) -> Tensor:
        """The decoder layer: keys and values of all rows, the output of the last row alone.

        Parameters
        ----------
        x : (m, hidden)
            At pairs ``begin`` to ``begin + m - 1``; the last attends to all up to itself.
        """
        end = begin + x.shape[0]  # (a symbol, where this is traced)
        q = self._take_in(x, begin, slice(begin, end))[-1:]
        return self._feed(x[-1:], self._attend(q, end))

    def _take_in(self, x: Tensor, begin: int, positions: slice) -> Tensor:
        """Write the rows' keys and values from place `begin` on; their queries."""
        s, kv_end = self.shape, self.shape.heads + self.shape.kv_heads
        qkv = self._qkv(normalise(x, s.eps)).view(x.shape[0], -1, s.head_dim)
        turned = self._turn(qkv[:, :kv_end], positions)
        end = begin + x.shape[0]
        self._keys[begin:end] = turned[:, s.heads :]
        self._values[begin:end] = qkv[:, kv_end:]
        return turned[:, : s.heads]

    def _attend(self, q: Tensor, end: int, hidden: Tensor | None = None) -> Tensor:
        """What (m, heads, head_dim) queries make of the pairs before `end`.

        `hidden` is (m, pairs) bool: which of them each query must not see.
        """
        s, m = self.shape, q.shape[0]
        group = s.heads // s.kv_heads
        q = q.view(m, s.kv_heads, group, s.head_dim).transpose(0, 1)
        q = q.reshape(s.kv_heads, m * group, s.head_dim)
        keys, values = self._keys[:end], self._values[:end].transpose(0, 1)
        scores = q @ keys.permute(1, 2, 0) * s.head_dim**-0.5
        if hidden is not None:
            scores.view(s.kv_heads, m, group, end).masked_fill_(hidden[:, None], float("-inf"))
        mixed = (scores.softmax(-1) @ values).view(s.kv_heads, m, group * s.head_dim)
        return mixed.transpose(0, 1).reshape(m, s.heads * s.head_dim)

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
