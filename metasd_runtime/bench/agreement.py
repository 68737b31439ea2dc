"""Do two outputs agree, and if not, was it a tie that fell otherwise?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from metasd_runtime.model.target import Target

__all__ = ["Agreement", "compare"]


class Agreement(NamedTuple):
    """How two continuations of one prompt compare.

    Attributes
    ----------
    difference : int or None
        Place of the first token that differs, counted from the first emitted one; None if they
        are equal.
    gap : float or None
        Difference of the target's two largest logits there (computed by one forward over the
        common prefix). In half precision a block's forward and a single token's round
        differently, so a gap near zero is a tie; in float32 there must be no difference at all.
    """

    difference: int | None
    gap: float | None

    def __str__(self) -> str:
        if self.difference is None:
            return "yes"
        return f"to token {self.difference}, top-2 gap {self.gap:.3g}"


def compare(
    target: Target, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> Agreement:
    """Find the first difference of two outputs and how sure the target was there."""
    if list(first) == list(second):
        return Agreement(None, None)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    target.reset()
    logits = target.forward([*prompt, *first[:common]], keep=1).logits[-1]
    top = logits.topk(2).values
    return Agreement(common, float(top[0] - top[1]))
