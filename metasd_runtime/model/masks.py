"""Attention masks of our own: whom each token sees, for each kind of layer a model has."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metasd_bandits import checks
from metasd_runtime.model.attention import own_attention
from metasd_runtime.model.tree import Block, ancestry

__all__ = ["Masks", "refuse_other_logits"]


class Masks:
    """Which keys each query may see: a mask, or one for each kind of layer the model has.

    Raises
    ------
    ConfigError
        For a model that takes none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        attention = own_attention(text)
        if attention not in ("sdpa", "eager"):
            raise checks.ConfigError(
                f"{name} attends through {attention!r}, which takes no mask of our own; "
                "a batch or a draft tree needs one, so load it with attn_implementation='sdpa'"
            )
        if getattr(text, "attention_types", None) is not None:  # GPT-Neo
            raise checks.ConfigError(
                f"{name} keeps local attention masks of its own, and takes none of ours; "
                "give one prompt a call, and drafts that are chains"
            )
        self.additive = attention == "eager"
        self.dtype = model.dtype
        self.window = getattr(text, "sliding_window", None)
        self.chunk = getattr(text, "attention_chunk_size", None)
        self.kinds = set(getattr(text, "layer_types", None) or ())
        if not self.kinds:  # one kind for all layers, as Mistral has it
            slides = self.window is not None and getattr(text, "use_sliding_window", True)
            self.kinds = {"sliding_attention" if slides else "full_attention"}

    def __call__(
        self, positions: Tensor, end: int, trees: Mapping[int, Block] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The mask, or one for each kind of layer by its name.

        Parameters
        ----------
        positions : (rows, width) int64
            Of each row's block, padded on the left; blocks are the last keys of their rows.
        end : int
            Keys that are looked at, each at its own position but for the nodes of trees.
        trees : mapping of row to Block, optional
            The rows whose block is a tree.
        """
        keys = torch.arange(end, device=positions.device).repeat(len(positions), 1)
        seen = keys[:, None] <= positions[:, :, None]
        for row, block in (trees or {}).items():
            _plant(block, keys[row], seen[row])
        masks = {kind: self._mask(kind, positions, keys, seen) for kind in self.kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, kind: str, positions: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        query, key = positions[:, :, None], keys[:, None]
        if kind == "sliding_attention" and self.window is not None:
            seen = seen & (key > query - self.window)
        elif kind == "chunked_attention" and self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        if not self.additive:
            return seen[:, None]
        hidden = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]


def _plant(block: Block, keys: Tensor, seen: Tensor) -> None:
    """Give a row's keys the positions of a tree's nodes, and let each see its ancestors."""
    places = slice(block.start, block.start + len(block.positions))
    keys[places] = keys.new_tensor(block.positions)
    own = seen[-len(block.positions) :]
    own[:, block.start :] = False
    own[:, places] = ancestry(block.parents).to(seen.device)


_trial = threading.RLock()  # other threads wait until a model is known to be fit
_tried: dict[str, weakref.WeakSet[PreTrainedModel]] = {}


def refuse_other_logits(
    model: PreTrainedModel,
    what: str,
    instead: str,
    ours: Callable[[], Sequence[Tensor]],
    plain: Callable[[], Sequence[Tensor]],
) -> None:
    """Refuse a model whose logits differ between our masks and plain forwards; tried once.

    Architectures that derive positions from a padding mask of their own (ALiBi, some local
    attention) cannot be told each token's position.

    Parameters
    ----------
    what : str
        It cannot do this; also names the trial.
    instead : str
        What the user should do.
    ours, plain : callable
        The logits both ways.

    Raises
    ------
    ConfigError
        With the architecture's name.
    """
    with _trial:
        fit = _tried.setdefault(what, weakref.WeakSet())
        if model not in fit:
            _try(model, what, instead, ours, plain, fit)


def _try(
    model: PreTrainedModel,
    what: str,
    instead: str,
    ours: Callable[[], Sequence[Tensor]],
    plain: Callable[[], Sequence[Tensor]],
    fit: weakref.WeakSet[PreTrainedModel],
) -> None:
    name = type(model).__name__
    fit.add(model)  # the trial itself reads with our masks
    try:
        for logits, expected in zip(ours(), plain(), strict=True):
            exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
            tolerance = 1e-3 if exact else 6e-2
            apart = float((logits - expected).abs().max() / expected.abs().max())
            if not apart <= tolerance:
                raise checks.ConfigError(
                    f"{name} cannot {what} (its logits differ by {apart:.2g} of the largest); "
                    f"{instead}"
                )
    except checks.ConfigError:
        fit.discard(model)
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        fit.discard(model)
        raise checks.ConfigError(f"{name} cannot {what} ({error}); {instead}") from error
