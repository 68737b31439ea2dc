"""What each field of a round may hold: one table, read by every reader of traces.

`Field.read` converts one value (a JSON value, a word of text) and `Field.check` a whole column;
both refuse what the table does not allow with the same message. Ranges that depend on the trace's
header (arms, N) are filled in by `fields_of`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIELDS", "RELATIONS", "Field", "Indexes", "TraceError", "fields_of", "unrelated"]

_MOST = 2**63 - 1


class TraceError(ValueError):
    """A trace that cannot be read as one; the message names the place and the fix."""


@dataclass(frozen=True, slots=True)
class Field:
    """A number's kind and range.

    Attributes
    ----------
    name : str
    whole : bool
        Whether it is an integer.
    low, high : float
        The allowed range, ends included unless `open_low` or `open_high`.
    unknown : bool
        Whether NaN (null in JSON) is allowed, for "not known".
    """

    name: str
    whole: bool
    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    unknown: bool = False

    def read(self, where: str, value: Any) -> Any:
        """The value as int or float, or `TraceError`; None is NaN where it may be unknown."""
        if value is None and self.unknown:
            return math.nan
        if type(value) is int or (type(value) is float and not self.whole):
            if self.low < value < self.high or self._allows(value):
                return value if self.whole else float(value)
            raise self._error(where, value, "is out of range")
        raise self._error(where, value, f"is not {'an integer' if self.whole else 'a number'}")

    def check(self, place: Callable[[int], str], values: NDArray[Any]) -> None:
        """Refuse a column that holds a value out of range; `place` names a row in the message."""
        if not values.size:
            return
        low, high = np.fmin.reduce(values), np.fmax.reduce(values)
        certain = self.unknown or values.dtype.kind != "f" or not np.isnan(values.sum())
        if certain and self._allows(low.item()) and self._allows(high.item()):
            return
        for row, value in enumerate(values.tolist()):
            if not self._allows(value):
                raise self._error(place(row), value, "is out of range")

    def _allows(self, value: float) -> bool:
        if value != value:
            return self.unknown
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)

    def _error(self, where: str, value: Any, fault: str) -> TraceError:
        kind = "an integer" if self.whole else "a number"
        low, high = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return TraceError(
            f"{where}: {self.name}={reprlib.repr(value)} {fault}; give {kind} in "
            f"{low}{self.low}, {self.high}{high}{', or null' if self.unknown else ''}"
        )


def _count(name: str) -> Field:
    return Field(name, True, 0, _MOST)


def _share(name: str, *, unknown: bool = False) -> Field:
    return Field(name, False, 0, 1, unknown=unknown)


def _duration(name: str, *, unknown: bool = False) -> Field:
    return Field(name, False, 0, math.inf, open_high=True, unknown=unknown)


FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        *map(_count, ("arm", "index", "drafted", "accepted", "emitted", "owed", "depth", "tokens")),
        *map(_share, ("block_efficiency", "block_divergence", "reward")),
        *map(_duration, ("draft_seconds", "verify_seconds", "switch_seconds")),
        Field("propensity", False, 0, 1, open_low=True, unknown=True),
        _duration("step", unknown=True),
        _share("rewards", unknown=True),
        _duration("steps", unknown=True),
    )
}
RELATIONS = (("accepted", "drafted", 0), ("emitted", "accepted", 1), ("depth", "drafted", 0))


def fields_of(n_arms: int, draft_length: int) -> dict[str, Field]:
    """`FIELDS` with the ranges that follow from K arms and blocks of N tokens."""
    most = {"arm": n_arms - 1, "emitted": draft_length + 1, "tokens": draft_length + 1}
    return {**FIELDS, **{name: replace(FIELDS[name], high=high) for name, high in most.items()}}


def unrelated(where: str, values: Mapping[str, Any]) -> None:
    """Refuse a round whose counts contradict each other: `RELATIONS` holds (small, large, plus)."""
    for small, large, more in RELATIONS:
        if small in values and values[small] > values[large] + more:
            plus = f" + {more}" if more else ""
            raise TraceError(
                f"{where}: {small}={values[small]} is more than {large}{plus} ({large}="
                f"{values[large]}); give an integer in [0, {values[large] + more}]"
            )


class Indexes:
    """Which indexes each query has had, so that a round that comes twice is found.

    A query in order takes one number of memory, whatever its rounds.
    """

    def __init__(self) -> None:
        self._next = np.zeros(1024, dtype=np.int64)  # a query has had 0 .. next - 1
        self._apart: dict[int, set[int]] = {}  # and these, which came out of order

    def add(self, query: NDArray[np.int64], index: NDArray[np.int64]) -> int | None:
        """Note rounds, given by (query's number, index); the row of the first repeated one."""
        if not len(query):
            return None
        while query.max() >= len(self._next):
            self._next = np.concatenate([self._next, np.zeros_like(self._next)])
        if self._in_order(query, index):
            return None
        by_query = np.argsort(query, kind="stable")
        if self._in_order(query[by_query], index[by_query]):
            return None
        rounds = zip(query.tolist(), index.tolist(), strict=True)
        return next((row for row, (q, i) in enumerate(rounds) if not self._one(q, i)), None)

    def _in_order(self, query: NDArray[np.int64], index: NDArray[np.int64]) -> bool:
        """Note rounds that go on where their queries stand, all of them or none."""
        breaks = (query[1:] != query[:-1]) | (index[1:] != index[:-1] + 1)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        runs = query[starts]
        if self._apart or (self._next[runs] != index[starts]).any():
            return False
        if len(np.unique(runs)) < len(runs):
            return False
        self._next[runs] = index[np.append(starts[1:], len(index)) - 1] + 1
        return True

    def add_one(self, query: int, index: int) -> bool:
        """Note one round; False where it was there already."""
        while query >= len(self._next):
            self._next = np.concatenate([self._next, np.zeros_like(self._next)])
        return self._one(query, index)

    def _one(self, query: int, index: int) -> bool:
        done = self._next[query]
        if index == done and index < _MOST:
            self._next[query] = index + 1
            return query not in self._apart or index not in self._apart[query]
        apart = self._apart.setdefault(query, set())
        if index < done or index in apart:
            return False
        apart.add(index)
        return True
