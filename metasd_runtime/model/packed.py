"""Blocks of different lengths without padding: side by side, and laid out as rows to attend.

A model's layers treat each token by itself, all but attention. So the blocks of a round can go
through it as one sequence, of just as many positions as there are tokens, if attention alone sees
them as rows, padded. Where drafts differ in length, that saves most of the time: a verification of
many rows is bound by arithmetic, and padding is computed like any token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from metasd_runtime.model.attention import GROUPED, attending

__all__ = ["Layout", "laid_out"]

_NAME = "metasd_packed"


class Layout(NamedTuple):
    """Where each token of a packed sequence stands among the padded rows.

    Attributes
    ----------
    rows, columns : (tokens,) int64
    shape : (rows, width)
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]


_layout: ContextVar[Layout] = ContextVar("layout")


@contextmanager
def laid_out(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """While this lasts, the model's attention reads packed sequences as rows of that layout."""
    token = _layout.set(layout)
    try:
        with attending(model, _NAME):
            yield
    finally:
        _layout.reset(token)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Any]:
    """Attention over rows for a (1, heads, tokens, head_dim) query; keys are in rows already.

    A padding query is zero and looks where its mask lets it; nobody reads what it finds.
    """
    rows, columns, shape = _layout.get()
    padded = query.new_zeros(*shape, query.shape[1], query.shape[3])
    padded[rows, columns] = query[0].transpose(0, 1)
    attend = AttentionInterface()[GROUPED]
    out, weights = attend(module, padded.transpose(1, 2), key, value, mask, **more)
    return out[rows, columns][None], weights


AttentionInterface.register(_NAME, _attend)
