"""Validation at the edge: every message names the value, the allowed range and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

__all__ = ["ConfigError", "choice", "integer", "number"]


class ConfigError(ValueError):
    """A configuration value that cannot work, refused when it is given."""


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Return `value` as a finite float inside the range, or raise `ConfigError`.

    Parameters
    ----------
    name : str
        The user's name for the value, repeated in the message.
    value : Any
        What the user gave.
    low, high : float
        The allowed range; `open_low` and `open_high` exclude its ends.

    Raises
    ------
    ConfigError
        If `value` is no number, not finite, or outside the range.
    """
    allowed = f"{'(' if open_low or low == -math.inf else '['}{low:g}, {high:g}"
    allowed += ")" if open_high or high == math.inf else "]"
    try:
        x = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r} is not a number; give one in {allowed}") from None
    inside = (low < x if open_low else low <= x) and (x < high if open_high else x <= high)
    if not (math.isfinite(x) and inside):
        raise ConfigError(f"{name}={value!r} is outside the allowed range {allowed}")
    return x


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high], or raise `ConfigError`.

    Booleans and fractions are refused: ``True`` arms or 2.5 tokens are mistakes.
    """
    allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name}={value!r} is not an integer; give {allowed}")
    x = value.__index__()
    if x < low or (high is not None and x > high):
        raise ConfigError(f"{name}={value!r} is out of range; give {allowed}")
    return int(x)


def choice(name: str, value: str, options: Iterable[str]) -> str:
    """Return `value` if it is one of `options`, or raise `ConfigError` with the near match."""
    known = sorted(options)
    if value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown {name} {value!r}{hint} Known: {', '.join(known)}")
