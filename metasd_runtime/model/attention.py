"""A model's attention exchanged for a function of ours, for as long as a context lasts.

One such function is here: grouped-query attention that copies no keys. The library's, under a
mask, first writes every key and value out once for each query head of its group, at every layer of
every forward; where one row of a long text is read, that costs more than the attention.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

__all__ = ["GROUPED", "attending", "can_attend", "grouped", "own_attention"]

GROUPED = "metasd_grouped"
_EXCHANGED = "metasd"  # what stands in the config of a model whose attention is exchanged
_function: ContextVar[str] = ContextVar("function", default="sdpa")
_users: Counter[int] = Counter()  # contexts that last, by the id of the config
_lock = threading.Lock()


def can_attend(model: PreTrainedModel) -> bool:
    """Whether the model's attention is a function that can be exchanged (SDPA's)."""
    config = model.config.get_text_config(decoder=True)
    return bool(model._can_set_attn_implementation() and own_attention(config) == "sdpa")


def own_attention(config: Any) -> str:
    """The name of a model's attention, whether or not some thread has it exchanged at present."""
    name: str = config._attn_implementation
    return "sdpa" if name == _EXCHANGED else name


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """While this lasts, the model (which `can_attend`) attends by the function of that name.

    In this thread: a thread that has exchanged nothing attends as ever, though the model's config,
    which all share, names our dispatcher until the last of them has ended.
    """
    config = model.config.get_text_config(decoder=True)
    token = _function.set(name)
    with _lock:
        _users[id(config)] += 1
        config._attn_implementation_internal = _EXCHANGED
    try:
        yield
    finally:
        with _lock:
            _users[id(config)] -= 1
            if not _users[id(config)]:
                del _users[id(config)]
                config._attn_implementation_internal = "sdpa"
        _function.reset(token)


def grouped(model: PreTrainedModel) -> AbstractContextManager[None]:
    """While this lasts, the model's attention copies no keys, if it can be exchanged."""
    return attending(model, GROUPED) if can_attend(model) else nullcontext()


_NO_GROUPS = nn.Identity()  # SDPA's function looks for the number of groups on the module


def _grouped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Any]:
    """SDPA with the query heads that share keys as so many more rows of one head."""
    sdpa = AttentionInterface()["sdpa"]
    batch, heads, n, width = query.shape
    shared = key.shape[1]
    group = heads // shared
    plain = mask is not None and mask.shape[1] == 1 and more.get("position_bias") is None
    if group == 1 or not plain:
        return sdpa(module, query, key, value, mask, **more)
    assert mask is not None
    rows = query.reshape(batch, shared, group * n, width)
    out, weights = sdpa(_NO_GROUPS, rows, key, value, mask.repeat(1, 1, group, 1), **more)
    out = out.view(batch, group, n, shared, -1).permute(0, 2, 3, 1, 4)
    return out.reshape(batch, n, heads, -1), weights


def _dispatch(module: nn.Module, *arguments: Any, **more: Any) -> tuple[Tensor, Any]:
    """By the function of the thread that asks."""
    attend = AttentionInterface()[_function.get()]
    out: tuple[Tensor, Any] = attend(module, *arguments, **more)
    return out


AttentionInterface.register(GROUPED, _grouped)
AttentionInterface.register(_EXCHANGED, _dispatch)
AttentionMaskInterface.register(_EXCHANGED, AttentionMaskInterface()["sdpa"])
