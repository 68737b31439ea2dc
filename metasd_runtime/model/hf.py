"""The one place that knows how transformers' private corners moved between 5.12 and 5.24."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = [
    "PreallocatedLayer",
    "SlotLayer",
    "cache_argument",
    "cache_of",
    "end_tokens",
    "full_attention",
    "generation_settings",
    "has_default_length",
    "logits_processors",
    "new_layers",
    "output_width",
    "refuse_stateful",
    "special_tokens",
    "unwrapped",
]

_STEP = 256  # storage grows by so many positions at least
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer in storage that is written in place.

    A forward writes behind what is kept and sees a view of the storage; rolling back moves a
    number. The library's growing layer copies itself at every step instead. Sliding-window
    layers keep everything here and are windowed by the attention mask alone, so that a rollback
    past the window needs no recording.

    Attributes
    ----------
    keys, values : (batch, heads, capacity, head_dim)
    length : int
        Positions that are valid; what lies behind them is scratch.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = self._first = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._storage(key_states)
        self.values = self._storage(value_states)
        self.is_initialized = True

    def _storage(self, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        # Zeros: a compiled forward reads some scratch too, with weight 0, and 0 * NaN is NaN.
        # Position by position, so that the part in use is one piece, whatever the capacity.
        return like.new_zeros((batch, self.capacity, heads, width)).transpose(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, source: Tensor, to: int) -> None:
        """Copy the keys and values at the positions `source` to `to` and behind."""
        assert self.keys is not None
        assert self.values is not None
        for stored in (self.keys, self.values):
            stored[:, :, to : to + len(source)] = stored[:, :, source]

    def reserve(self, needed: int) -> None:
        """Make room for that many positions; what is kept stays."""
        if needed <= self.capacity:
            return
        # Rungs of one ladder, an eighth to a sixteenth apart: copying stays cheap, layers agree.
        step = max(_STEP, (1 << needed.bit_length()) // 16)
        self.capacity = -(-needed // step) * step
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._storage(old)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + n, 0

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget every position, and give back what one long text made the storage grow to."""
        self.length = 0
        if self.capacity > self._first:
            self.capacity = self._first
            if self.is_initialized:
                assert self.keys is not None
                assert self.values is not None
                self.keys, self.values = self._storage(self.keys), self._storage(self.values)

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class SlotLayer(CacheLayerMixin):
    """One layer's storage as a traced forward uses it: written at given slots, read whole.

    Parameters
    ----------
    keys, values : (batch, heads, capacity, head_dim)
        Written in place.
    slots : (n,) int64
        Where a block's n positions go.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._capacity(), 0

    def get_seq_length(self, *args: Any) -> int:
        return 0  # the caller says where the block stands

    def get_max_length(self) -> int:
        return self._capacity()

    def get_max_cache_shape(self) -> int:
        return self._capacity()

    def _capacity(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


def new_layers(model: PreTrainedModel, capacity: int) -> list[PreallocatedLayer]:
    """Fresh storage, one layer for each of the model's."""
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return [PreallocatedLayer(capacity) for _ in range(n_layers)]


def cache_of(layers: Sequence[CacheLayerMixin]) -> Cache:
    """The layers as the library's models take them; they stay shared with the caller."""
    return Cache(layers=list(layers))


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: ``past_key_values``, or ``cache`` since 5.24.

    The wrong name is not refused: a model takes it among its keyword arguments, and reads nothing.
    """
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def full_attention(model: PreTrainedModel) -> bool:
    """Whether every layer attends to the whole text, no window or chunk of it."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is None or not getattr(config, "use_sliding_window", True)


def refuse_stateful(model: PreTrainedModel) -> None:
    """Refuse models whose state cannot be rolled back token by token.

    Raises
    ------
    ValueError
        For encoder-decoder, recurrent and hybrid models, with the reason.
    """
    config = model.config
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; MetaSD decodes causal models")
    recurrent = getattr(model, "_is_stateful", False) or "recurrent" in getattr(
        config,
        "block_types",
        (),  # recurrent_gemma, which 5.12 does not mark as stateful
    )
    if recurrent or not kinds <= _ATTENTION:
        strange = ", ".join(sorted(kinds - _ATTENTION)) or "a recurrent state"
        raise ValueError(
            f"{name} has {strange}, which cannot be rolled back after a rejected draft; "
            "MetaSD needs a model whose layers are all attention"
        )


def unwrapped(model: Any) -> Any:
    """The causal LM inside a PEFT wrapper: its adapters live in the layers, so they stay on.

    Raises
    ------
    ValueError
        For prompt learning (prefix or prompt tuning), whose virtual tokens stand before the text.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        return model
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"the PEFT adapter {name!r} is prompt learning, whose virtual tokens this decoder "
                "cannot place; merge it, or use an adapter that changes the layers (LoRA and kin)"
            )
    return model.get_base_model()


def output_width(model: PreTrainedModel) -> int:
    """Width of the logits, whatever form (quantised, say) the output head's weights have."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
        return weight.shape[0]
    return int(head.out_features)


def special_tokens(config: GenerationConfig) -> tuple[list[int], int]:
    """What ends a text, and what fills up a row: as `generate` reads a settled config.

    The ids may have been given in any form that makes a tensor. The filler is the padding token,
    else the first that ends a text, else 0.
    """
    eos: Tensor | None = config._eos_token_tensor
    pad: Tensor | None = config._pad_token_tensor
    ends = [] if eos is None else eos.flatten().tolist()
    return ends, int(pad) if pad is not None and pad >= 0 else next(iter(ends), 0)


def end_tokens(model: Any) -> int | list[int]:
    """What ends the model's texts; where nothing does, a token that never comes.

    Without one the library's own prompt lookup fails in 5.12.
    """
    eos = model.generation_config.eos_token_id
    return output_width(model) if eos is None else eos


def has_default_length(
    model: Any, given: GenerationConfig | None, settings: dict[str, Any]
) -> bool:
    """Whether nobody set ``max_length``: not the call, not its config, not the model's."""
    sources = (settings.get("max_length"), getattr(given, "max_length", None))
    return all(value is None for value in (*sources, model.generation_config.max_length))


def generation_settings(
    model: Any, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The generation config as `generate` would settle it, and the arguments it does not know."""
    config, unknown = model._prepare_generation_config(given, **kwargs)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device)
    return config, unknown


def logits_processors(
    model: Any,
    config: GenerationConfig,
    prompt: Sequence[int],
    custom: LogitsProcessorList | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    batch: int = 0,
) -> LogitsProcessorList:
    """The processors and warpers that `generate` would apply to a row, in its order.

    `batch` is the place of the row's prompt in its batch, which `prefix_allowed_tokens_fn` is told.
    """
    allowed = prefix_allowed_tokens_fn
    config = copy.copy(config)
    config.num_return_sequences = 1  # rows go through their processors one at a time
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=torch.tensor([list(prompt)], device=model.device),
        prefix_allowed_tokens_fn=None if allowed is None else lambda _, ids: allowed(batch, ids),
        logits_processor=custom if custom is not None else LogitsProcessorList(),
        device=str(model.device),
        model_kwargs={},
    )
