"""How a drafter's weights lie in a pool's file: eight bits a weight, or four of a difference.

Specialists begin as copies of one drafter and stay near it, so what each adds is small beside what
all share, and four bits of that say as much as eight of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from metasd_runtime.drafters.matrix import quantise

__all__ = ["restored", "stored"]

_GROUP = 64  # weights of a row that share a scale, in four bits
_HALF = 7  # four bits hold -7 to 7


def stored(
    name: str, weights: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A drafter's weights by their names in the file.

    Matrices have eight bits a weight and a scale for each row. With a `base` (weights as `restored`
    gives them) they are differences from it, of four bits, with a scale for every 64 of a row;
    the rest is kept as it is.
    """
    tensors = {}
    for key, weight in weights.items():
        label = f"{name}.{key}"
        if weight.dim() != 2:
            tensors[label] = weight.float()
        elif base is None:
            tensors[label], tensors[f"{label}.scale"] = quantise(weight)
        else:
            difference = weight.float() - base[key]
            tensors[f"{label}.difference"], tensors[f"{label}.scale"] = _pack(difference)
    return tensors


def restored(
    tensors: Mapping[str, Tensor],
    name: str,
    sizes: Mapping[str, tuple[int, ...]],
    base: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The weights in float32, of these names and shapes, from a file's tensors.

    Raises
    ------
    KeyError
        If one is missing or has another shape.
    """
    weights = {}
    for key, size in sizes.items():
        label = f"{name}.{key}"
        if len(size) != 2:
            weight = tensors[label].float()
        elif base is None:
            weight = tensors[label].float() * tensors[f"{label}.scale"][:, None]
        else:
            packed, scale = tensors[f"{label}.difference"], tensors[f"{label}.scale"]
            weight = base[key] + _unpack(packed, scale, size)
        if weight.shape != size:
            raise KeyError(f"{label} has shape {tuple(weight.shape)}, not {size}")
        weights[key] = weight
    return weights


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two values a byte, (out, in / 2) uint8, and scales (out, groups) in half precision."""
    groups = _groups(weight)
    scale = (groups.abs().amax(-1) / _HALF).clamp(min=1e-7).half()
    levels = (groups / scale.float()[..., None]).round().clamp(-_HALF, _HALF).add(_HALF + 1)
    low, high = levels.to(torch.uint8).flatten(1).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4, scale


def _unpack(packed: Tensor, scale: Tensor, size: tuple[int, ...]) -> Tensor:
    levels = torch.stack([packed & 15, packed >> 4], -1).float() - (_HALF + 1)
    values = levels.view(*scale.shape, -1) * scale.float()[..., None]
    return values.flatten(1)[:, : size[1]]


def _groups(weight: Tensor) -> Tensor:
    """(out, groups, 64), filled up with zeros behind the last weight of a row."""
    short = -weight.shape[1] % _GROUP
    return torch.nn.functional.pad(weight, (0, short)).unflatten(1, (-1, _GROUP))
