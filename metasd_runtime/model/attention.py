"""A model's attention exchanged for a function of ours, for as long as a context lasts.

One such function is here: grouped-query attention that copies no keys. The library's, under a
mask, first writes every key and value out once for each query head of its group, at every layer of
every forward; where one row of a long text is read, that costs more than the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

__all__ = ["GROUPED", "attending", "can_attend", "grouped"]

GROUPED = "metasd_grouped"


def can_attend(model: PreTrainedModel) -> bool:
    """Whether the model's attention is a function that can be exchanged (SDPA's)."""
    config = model.config.get_text_config(decoder=True)
    return bool(model._can_set_attn_implementation() and config._attn_implementation == "sdpa")


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """While this lasts, the model attends by the function registered under that name."""
    config = model.config.get_text_config(decoder=True)
    present = config._attn_implementation
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = present


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


AttentionInterface.register(GROUPED, _grouped)
AttentionMaskInterface.register(GROUPED, AttentionMaskInterface()["sdpa"])
