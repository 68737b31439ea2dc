"""Validation at the edge: every message names the value, the allowed range and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

__all__ = ["ConfigError", "choice", "integer", "number", "shown"]


_LONGEST = 80


class ConfigError(ValueError):
    """A configuration value that cannot work, refused when it is given."""


def shown(value: Any) -> str:
    """A value as an error message shows it: its repr, the middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"<{type(value).__name__} of more digits than can be written>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 23]}...{text[-20:]}"


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
    except OverflowError:  # an int beyond every float
        x = math.inf
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={shown(value)} is not a number; give one in {allowed}") from None
    inside = (low < x if open_low else low <= x) and (x < high if open_high else x <= high)
    if not (math.isfinite(x) and inside):
        raise ConfigError(f"{name}={shown(value)} is outside the allowed range {allowed}")
    return x


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high], or raise `ConfigError`.

    Booleans and fractions are refused: ``True`` arms or 2.5 tokens are mistakes.
    """
    allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name}={shown(value)} is not an integer; give {allowed}")
    x = value.__index__()
    if x < low or (high is not None and x > high):
        raise ConfigError(f"{name}={shown(value)} is out of range; give {allowed}")
    return int(x)


def choice(name: str, value: str, options: Iterable[str]) -> str:
    """Return `value` if it is one of `options`, or raise `ConfigError` with the near match."""
    known = sorted(options)
    if value in known:
        return value
    text = value[:_LONGEST] if isinstance(value, str) else shown(value)
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown {name} {shown(value)}{hint} Known: {', '.join(known)}")
