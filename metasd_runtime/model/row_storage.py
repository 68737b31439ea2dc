"""Keys and values of many rows in one storage: each row has its own length, kept as a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["RowLayer", "RowStorage"]

_FIRST_CAPACITY = 256


class RowStorage:
    """The rows of a batch and how many tokens of each are in the cache.

    A *slot* is a row's name for as long as it lives; its *place* is where its keys lie. Open
    slots always fill the first places, so that a forward over all of them reads the storage
    without copying it; closing one moves the last into the gap.

    Parameters
    ----------
    n_layers, n_slots : int
        Layers of the model, and the most rows at a time.

    Attributes
    ----------
    lengths : list of int
        Valid tokens of each slot; what lies behind them is scratch.
    layers : list of RowLayer
        (n_slots, heads, capacity, head_dim) each, allocated on first use, doubled when full.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self.n_slots = n_slots
        self.capacity = _FIRST_CAPACITY
        self.lengths = [0] * n_slots
        self._slot_at = list(range(n_slots))
        self._open = 0
        self.layers = [RowLayer(self) for _ in range(n_layers)]

    def place(self, slot: int) -> int:
        """Where an open slot's keys lie."""
        return self._slot_at.index(slot)

    def open(self, slot: int) -> None:
        """Let a row begin, with nothing read."""
        self._swap(self.place(slot), self._open)
        for layer in self.layers:
            layer.clear(self._open)
        self.lengths[slot] = 0
        self._open += 1

    def close(self, slot: int) -> None:
        """Let a row go; the last open one takes its place."""
        place, last = self.place(slot), self._open - 1
        if place != last:
            for layer in self.layers:
                layer.move(last, place, self.lengths[self._slot_at[last]])
        self._swap(place, last)
        self._open -= 1

    def _swap(self, i: int, j: int) -> None:
        slots = self._slot_at
        slots[i], slots[j] = slots[j], slots[i]

    def aim(self, places: Sequence[int], rows: Tensor, positions: Tensor, end: int) -> None:
        """Tell the layers which rows the coming forward concerns.

        Parameters
        ----------
        places : sequence of int
            In increasing order.
        rows, positions : (rows, width) int64, or (1, tokens) where they are packed
            The place and the position at which each token's keys are written (`rows` may be
            broadcast).
        end : int
            Keys ``[0, end)`` of each row are attended to (as far as the mask allows).
        """
        whole = list(places) == list(range(len(places)))
        self.rows: slice | Tensor = (
            slice(0, len(places)) if whole else torch.tensor(places, device=positions.device)
        )
        self.written = rows, positions
        self.end = end
        if end > self.capacity:
            self.capacity = max(end, 2 * self.capacity)
            for layer in self.layers:
                layer.grow()


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, written where the storage says."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, storage: RowStorage) -> None:
        super().__init__()
        self._storage = storage

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, since a masked key weighs 0 and 0 times a NaN left in memory would be NaN.
        shape = (self._storage.n_slots, like.shape[1], self._storage.capacity, like.shape[3])
        return like.new_zeros(shape)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        storage = self._storage
        places, positions = storage.written
        assert self.keys is not None
        assert self.values is not None
        self.keys[places, :, positions] = key_states.transpose(1, 2)
        self.values[places, :, positions] = value_states.transpose(1, 2)
        return self.keys[storage.rows, :, : storage.end], self.values[
            storage.rows, :, : storage.end
        ]

    def grow(self) -> None:
        """Take the storage's new capacity."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._allocate(old)
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    @torch.inference_mode()
    def clear(self, place: int) -> None:
        """Zero a row: a broken drafter may have left NaN in it."""
        if self.is_initialized:
            self.keys[place].zero_()  # type: ignore[index]
            self.values[place].zero_()  # type: ignore[index]

    @torch.inference_mode()
    def move(self, source: int, place: int, length: int) -> None:
        """Copy the first `length` keys and values of one place to another."""
        if self.is_initialized:
            for stored in (self.keys, self.values):
                assert stored is not None
                stored[place, :, :length] = stored[source, :, :length]

    def gather(self, place: int, source: Tensor, to: int) -> None:
        """Copy a row's keys and values at the positions `source` to `to` and behind."""
        for stored in (self.keys, self.values):
            assert stored is not None
            stored[place, :, to : to + len(source)] = stored[place][:, source]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._storage.end, 0

    def get_seq_length(self, *args: Any) -> int:
        return self._storage.end

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1
