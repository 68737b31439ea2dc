"""A causal language model over rows of different lengths: one forward, padding never felt.

The blocks stand side by side (`packed`) where the model lets them, else they are padded on the left
to the widest; every row has its own positions and its own mask, so that what a row computes is
what it would compute alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_bandits import checks
from metasd_runtime.hf import cache_argument, cache_of, output_width, refuse_stateful
from metasd_runtime.packed import Layout, can_attend, laid_out
from metasd_runtime.row_storage import RowStorage
from metasd_runtime.target import CachedModel, Forward

__all__ = ["RaggedModel", "Row", "packs", "refuse_ragged"]

_PREFILL_CHUNK = 512


class Row(NamedTuple):
    """One row of a ragged model, as `commit` knows a target."""

    model: RaggedModel
    slot: int

    def rollback(self, n: int) -> None:
        """Forget the row's last n tokens, O(1)."""
        self.model.rollback(self.slot, n)


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
        self._masks = _Masks(model)
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
    def forward(
        self,
        slots: Sequence[int],
        blocks: Sequence[Sequence[int]],
        *,
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

        Returns
        -------
        list of Forward
            In the order of `slots`; row i has ``len(blocks[i])`` positions (or `keep`, if less).
        """
        storage = self.storage
        order = sorted(range(len(slots)), key=lambda i: storage.place(slots[i]))
        aimed = self._aim([slots[i] for i in order], [blocks[i] for i in order], keep)
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

    def _aim(self, slots: Sequence[int], blocks: Sequence[Sequence[int]], keep: int) -> _Aimed:
        """What the model is given; the storage is told where it will write.

        Padding stands at the position of its row's first token and is written behind the last,
        where the row's own next block overwrites it.
        """
        width = max(len(block) for block in blocks)
        lengths = [self.storage.lengths[slot] for slot in slots]
        ids, positions, written = [], [], []
        for start, block in zip(lengths, blocks, strict=True):
            n, padding = len(block), width - len(block)
            ids.append([0] * padding + list(block))
            positions.append([start] * padding + list(range(start, start + n)))
            written.append([*range(start + n, start + width), *range(start, start + n)])
        device = self.model.device
        given = torch.tensor([ids, positions, written]).to(device)
        places = [self.storage.place(slot) for slot in slots]
        end = max(lengths) + width
        masks = self._masks(given[1], end)
        if not self.packs or all(len(block) == width for block in blocks):
            self.storage.aim(places, torch.tensor(places, device=device)[:, None], given[2], end)
            return _Aimed(given[0], given[1], masks, keep, False, nullcontext())
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


class _Masks:
    """Which keys each query may see: a mask, or one for each kind of layer the model has."""

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        attention = text._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise checks.ConfigError(
                f"{name} attends through {attention!r}, which takes no mask of our own, and a "
                "batch needs one; load it with attn_implementation='sdpa'"
            )
        if getattr(text, "attention_types", None) is not None:  # GPT-Neo
            raise checks.ConfigError(
                f"{name} keeps local attention masks of its own, which no row of a batch can "
                "shift; give one prompt a call"
            )
        self.additive = attention == "eager"
        self.dtype = model.dtype
        self.window = getattr(text, "sliding_window", None)
        self.chunk = getattr(text, "attention_chunk_size", None)
        self.kinds = set(getattr(text, "layer_types", None) or ())
        if not self.kinds:  # one kind for all layers, as Mistral has it
            slides = self.window is not None and getattr(text, "use_sliding_window", True)
            self.kinds = {"sliding_attention" if slides else "full_attention"}

    def __call__(self, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        query = positions[:, None, :, None]
        key = torch.arange(end, device=positions.device)
        masks = {kind: self._mask(kind, query, key) for kind in self.kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, kind: str, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if kind == "sliding_attention" and self.window is not None:
            seen &= key > query - self.window
        elif kind == "chunked_attention" and self.chunk is not None:
            seen &= key // self.chunk == query // self.chunk
        if not self.additive:
            return seen
        hidden = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(self.dtype).min)


_fit: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@torch.inference_mode()
def refuse_ragged(model: PreTrainedModel) -> None:
    """Refuse a model whose rows feel their neighbours, by trying two rows of 7 and 2 tokens.

    Once for each model.

    Architectures that derive positions from a padding mask of their own (ALiBi, some local
    attention) cannot be told each row's positions.

    Raises
    ------
    ConfigError
        With the architecture's name.
    """
    if model in _fit:
        return
    name = type(model).__name__
    vocab = output_width(model)
    texts = [[(7 * i + 3) % vocab for i in range(7)], [5 % vocab, 2 % vocab]]
    blocks = [[4 % vocab], [1 % vocab, 6 % vocab, 3 % vocab]]
    ragged = RaggedModel(model, 3)
    try:
        for slot, text in zip((2, 0), texts, strict=True):
            ragged.storage.open(slot)
            ragged.prefill(slot, text)
        together = ragged.forward([2, 0], blocks)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, checks.ConfigError):
            raise
        raise checks.ConfigError(
            f"{name} cannot decode a batch of different lengths ({error}); give one prompt a call"
        ) from error
    for text, block, row in zip(texts, blocks, together, strict=True):
        single = CachedModel(model)
        single.forward(text)
        alone = single.forward(block).logits
        tolerance = _tolerance(model)
        apart = float((row.logits - alone).abs().max() / alone.abs().max())
        if not apart <= tolerance:
            raise checks.ConfigError(
                f"{name} gives a row in a batch other logits than alone (they differ by "
                f"{apart:.1%}); give one prompt a call"
            )
    _fit.add(model)


def _tolerance(model: PreTrainedModel) -> float:
    """How far rounding may move a logit, as a share of the largest."""
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    return 1e-3 if exact else 6e-2


_packs: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def packs(model: PreTrainedModel) -> bool:
    """Whether blocks of different lengths can go through a model side by side (`packed`).

    Tried once for each model, on two rows that are computed padded as well.
    """
    if model not in _packs:
        _packs[model] = False  # until it is known: the trial makes ragged models, too
        try:
            _packs[model] = can_attend(model) and _apart(model) <= _tolerance(model)
        except Exception:  # whatever an architecture may stumble over: it is padded, then
            return False
    return _packs[model]


@torch.inference_mode()
def _apart(model: PreTrainedModel) -> float:
    """The largest distance between packed and padded logits, over the largest of them."""
    blocks = [[1], [1, 0, 1]]
    logits = []
    for packed in (False, True):
        ragged = RaggedModel(model, 2)
        ragged.packs = packed
        for slot, text in enumerate(([0, 1, 1, 0, 1], [1, 0])):
            ragged.storage.open(slot)
            ragged.prefill(slot, text)
        whole = ragged.forward([0, 1], blocks)
        last = ragged.forward([0, 1], blocks, keep=1)
        logits.append(torch.cat([forward.logits for forward in (*whole, *last)]))
    padded, packed_ = logits
    return float((padded - packed_).abs().max() / padded.abs().max())
