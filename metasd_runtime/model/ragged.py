"""A causal language model over rows of different lengths: one forward, padding never felt.

The blocks stand side by side (`packed`) where the model lets them, else they are padded on the left
to the widest; every row has its own positions and its own mask, so that what a row computes is
what it would compute alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_bandits import checks
from metasd_runtime.model.attention import can_attend, grouped
from metasd_runtime.model.hf import cache_argument, cache_of, output_width, refuse_stateful
from metasd_runtime.model.masks import Masks, refuse_other_logits
from metasd_runtime.model.packed import Layout, laid_out
from metasd_runtime.model.row_storage import RowStorage
from metasd_runtime.model.target import CachedModel, Forward, refuse_trees
from metasd_runtime.model.tree import Block, moves

__all__ = ["RaggedModel", "Row", "packs", "refuse_ragged"]

_PREFILL_CHUNK = 512


class Row(NamedTuple):
    """One row of a ragged model, as `commit` knows a target."""

    model: RaggedModel
    slot: int

    def keep(self, n: int, places: Sequence[int]) -> None:
        """Of the row's last n tokens keep those at `places`, ascending, and forget the others."""
        self.model.keep(self.slot, n, places)


class _Aimed(NamedTuple):
    """A forward's inputs, and how its outputs fall to the rows."""

    ids: Tensor
    positions: Tensor
    masks: Tensor | dict[str, Tensor]
    keep: int | Tensor
    packed: bool
    context: AbstractContextManager[None]

    def split(self, output: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The (length, width) part of each row."""
        if self.packed:
            return list(output[0].split(list(lengths)))
        return [row[-n:] for row, n in zip(output, lengths, strict=True)]


class RaggedModel:
    """A causal LM and the tokens it has read in each of several rows.

    Parameters
    ----------
    model : PreTrainedModel
    n_slots : int
        Most rows at a time.
    storage : RowStorage, optional
        Shared storage (early exit drafts in the target's own first layers); ``model`` uses its
        first layers then.

    Attributes
    ----------
    packs : bool
        Whether blocks of different lengths stand side by side, without padding.
    forwards : int
        Those that were made.
    """

    def __init__(
        self, model: PreTrainedModel, n_slots: int, storage: RowStorage | None = None
    ) -> None:
        refuse_stateful(model)
        self.model = model
        text = model.config.get_text_config(decoder=True)
        n_layers = text.num_hidden_layers
        self.storage = RowStorage(n_layers, n_slots) if storage is None else storage
        self._cache = cache_of(self.storage.layers[:n_layers])
        self._cache_argument = cache_argument(model)
        self._masks = Masks(model)
        self.packs = packs(model)
        self.forwards = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, for each slot."""
        return self.storage.lengths

    @property
    def max_length(self) -> int | None:
        """Most positions the model can take, or None where its config names no limit."""
        return getattr(
            self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )

    def rollback(self, slot: int, n: int) -> None:
        """Forget a row's last n tokens, O(1)."""
        self.storage.lengths[slot] -= n

    @torch.inference_mode()
    def keep(self, slot: int, n: int, places: Sequence[int]) -> None:
        """Of a row's last n tokens keep those at `places`, ascending, and forget the others."""
        start = self.lengths[slot] - n
        to, source = moves(places)
        if source:
            positions = torch.tensor(source, device=self.model.device) + start
            for layer in self.storage.layers:
                layer.gather(self.storage.place(slot), positions, start + to)
        self.rollback(slot, n - len(places))

    @torch.inference_mode()
    def forward(
        self,
        slots: Sequence[int],
        blocks: Sequence[Sequence[int]],
        *,
        parents: Sequence[Sequence[int] | None] | None = None,
        keep: int = 0,
        features: Sequence[int] = (),
    ) -> list[Forward]:
        """Extend each row's cache by its block; the logits behind each token, or the last `keep`.

        `features` names hidden states by the layers behind them, as in `CachedModel.forward`.

        Parameters
        ----------
        slots : sequence of int
            Distinct open slots.
        blocks : sequence of token sequences
            One for each slot, of any lengths of at least 1.
        parents : sequence, optional
            For each slot whose block is a token and a tree behind it, the tree's, as in
            `CachedModel.forward`; None for the others.

        Returns
        -------
        list of Forward
            In the order of `slots`; row i has ``len(blocks[i])`` positions (or `keep`, if less).
        """
        storage = self.storage
        order = sorted(range(len(slots)), key=lambda i: storage.place(slots[i]))
        trees = {
            row: Block(storage.lengths[slots[i]], parents[i] or [])
            for row, i in enumerate(order)
            if parents is not None and parents[i] is not None
        }
        if trees:
            refuse_trees(self.model)
        aimed = self._aim([slots[i] for i in order], [blocks[i] for i in order], trees, keep)
        with aimed.context:
            output = self.model(
                input_ids=aimed.ids,
                position_ids=aimed.positions,
                attention_mask=aimed.masks,
                use_cache=True,
                logits_to_keep=aimed.keep,
                output_hidden_states=bool(features),
                return_dict=True,
                **{self._cache_argument: self._cache},
            )
        self.forwards += 1
        for slot, block in zip(slots, blocks, strict=True):
            storage.lengths[slot] += len(block)
        states = [output.hidden_states[layer] for layer in features]
        lengths = [len(blocks[i]) for i in order]
        logits = aimed.split(output.logits, [min(n, keep or n) for n in lengths])
        hidden = aimed.split(torch.cat(states, -1), lengths) if states else [None] * len(slots)
        results = dict(zip(order, zip(logits, hidden, strict=True), strict=True))
        return [Forward(results[i][0].float(), results[i][1]) for i in range(len(slots))]

    def _aim(
        self,
        slots: Sequence[int],
        blocks: Sequence[Sequence[int]],
        trees: Mapping[int, Block],
        keep: int,
    ) -> _Aimed:
        """What the model is given; the storage is told where it will write.

        Padding stands at the position of its row's first token and is written behind the last,
        where the row's own next block overwrites it.
        """
        width = max(len(block) for block in blocks)
        lengths = [self.storage.lengths[slot] for slot in slots]
        ids, positions, written = [], [], []
        for row, (start, block) in enumerate(zip(lengths, blocks, strict=True)):
            n, padding = len(block), width - len(block)
            ids.append([0] * padding + list(block))
            standing = trees[row].positions if row in trees else range(start, start + n)
            positions.append([start] * padding + list(standing))
            written.append([*range(start + n, start + width), *range(start, start + n)])
        device = self.model.device
        given = torch.tensor([ids, positions, written]).to(device)
        places = [self.storage.place(slot) for slot in slots]
        end = max(lengths) + width
        masks = self._masks(given[1], end, trees)
        if not self.packs or all(len(block) == width for block in blocks):
            self.storage.aim(places, torch.tensor(places, device=device)[:, None], given[2], end)
            return _Aimed(given[0], given[1], masks, keep, False, grouped(self.model))
        starts = torch.tensor([width - len(block) for block in blocks], device=device)
        tokens = torch.arange(width, device=device) >= starts[:, None]
        rows, columns = tokens.nonzero(as_tuple=True)
        given = given[:, None, rows, columns]  # (3, 1, tokens)
        self.storage.aim(places, torch.tensor(places, device=device)[rows][None], given[2], end)
        last = (columns >= width - keep).nonzero()[:, 0] if keep else 0
        context = laid_out(self.model, Layout(rows, columns, (len(slots), width)))
        return _Aimed(given[0], given[1], masks, last, True, context)

    def prefill(
        self, slot: int, tokens: Sequence[int], features: Sequence[int] = ()
    ) -> Tensor | None:
        """Extend one row by a prompt, in chunks, computing no more logits than it must.

        Returns the `features` asked for.
        """
        states = []
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            chunk = tokens[start : start + _PREFILL_CHUNK]
            states.append(self.forward([slot], [chunk], keep=1, features=features)[0].features)
        kept = [state for state in states if state is not None]
        return torch.cat(kept) if kept else None


@torch.inference_mode()
def refuse_ragged(model: PreTrainedModel) -> None:
    """Refuse a model whose rows feel their neighbours, by trying two rows of 7 and 2 tokens.

    Raises
    ------
    ConfigError
        With the architecture's name.
    """
    vocab = output_width(model)
    texts = [[(7 * i + 3) % vocab for i in range(7)], [5 % vocab, 2 % vocab]]
    blocks = [[4 % vocab], [1 % vocab, 6 % vocab, 3 % vocab]]

    def together() -> list[Tensor]:
        ragged = RaggedModel(model, 3)
        for slot, text in zip((2, 0), texts, strict=True):
            ragged.storage.open(slot)
            ragged.prefill(slot, text)
        return [forward.logits for forward in ragged.forward([2, 0], blocks)]

    def alone() -> list[Tensor]:
        logits = []
        for text, block in zip(texts, blocks, strict=True):
            single = CachedModel(model)
            single.forward(text)
            logits.append(single.forward(block).logits)
        return logits

    what = "decode a batch of different lengths"
    refuse_other_logits(model, what, "give one prompt a call", together, alone)


_packs: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def packs(model: PreTrainedModel) -> bool:
    """Whether blocks of different lengths can go through a model side by side (`packed`).

    Tried once for each model, on two rows that are computed padded as well.
    """
    if model not in _packs:
        _packs[model] = False  # until it is known: the trial makes ragged models, too
        try:
            if can_attend(model):
                refuse_other_logits(
                    model,
                    "be given blocks side by side",
                    "they are padded",
                    functools.partial(_two_blocks, model, True),
                    functools.partial(_two_blocks, model, False),
                )
                _packs[model] = True
        except checks.ConfigError:
            pass
    return _packs[model]


@torch.inference_mode()
def _two_blocks(model: PreTrainedModel, packed: bool) -> list[Tensor]:
    """Logits of two rows' blocks, all and the last alone."""
    ragged, blocks = RaggedModel(model, 2), [[1], [1, 0, 1]]
    ragged.packs = packed
    for slot, text in enumerate(([0, 1, 1, 0, 1], [1, 0])):
        ragged.storage.open(slot)
        ragged.prefill(slot, text)
    forwards = [*ragged.forward([0, 1], blocks), *ragged.forward([0, 1], blocks, keep=1)]
    return [forward.logits for forward in forwards]
