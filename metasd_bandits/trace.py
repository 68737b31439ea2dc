"""Trace files: one JSON line per round, appended as decoding goes, a versioned header first.

Line 1 is the header, ``{"format": "metasd-trace", "version": 1, "arms": [...], ...}``; every
other line is one `Round`. A crash loses at most the last line, which a reader drops with a
warning. NaN is written as null, so that every line is strict JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metasd_bandits.round import Round

__all__ = ["Trace", "TraceError", "TraceHeader", "TraceWriter", "read_trace"]

FORMAT = "metasd-trace"
VERSION = 1
_FIELDS = [f.name for f in dataclasses.fields(Round)]
_REQUIRED = [f.name for f in dataclasses.fields(Round) if f.default is dataclasses.MISSING]
_NAN_FIELDS = {"propensity", "step"}


class TraceError(ValueError):
    """A trace file that cannot be read as one; the message names the line and the fix."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for a whole trace.

    Attributes
    ----------
    arms : tuple of str
        Drafter names; a round's ``arm`` indexes them.
    draft_length : int
        N, the most tokens a block may hold.
    policy : str
        The logging policy, as `make_policy` would read it.
    reward : str
        The name of the reward in each round.
    meta : dict
        Anything else worth keeping: target, seed, sampling, seconds of a plain step.
    """

    arms: tuple[str, ...]
    draft_length: int
    policy: str
    reward: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """A trace in memory: its header and its rounds, in the order they were written."""

    header: TraceHeader
    rounds: list[Round]

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(self.rounds)


class TraceWriter:
    """Append rounds to a trace file, each flushed as it is written.

    Parameters
    ----------
    path : path-like
        A new file is begun with the header; an existing trace with the same arms, draft length
        and reward is continued.
    header : TraceHeader

    Raises
    ------
    TraceError
        If the file exists and is no trace, or one of other arms.
    OSError
        If the path cannot be written; raised here, before anything is decoded.
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        self.path = Path(path)
        self.header = header
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        if not fresh:
            self._check_same(header)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if fresh:
            self._line({"format": FORMAT, "version": VERSION, **dataclasses.asdict(header)})

    def _check_same(self, header: TraceHeader) -> None:
        present = _read_header(self.path)
        for name in ("arms", "draft_length", "reward"):
            mine, theirs = getattr(header, name), getattr(present, name)
            if mine != theirs:
                raise TraceError(
                    f"{self.path} already holds a trace with {name}={theirs!r}, not {mine!r}; "
                    "write to another file"
                )
        _drop_torn_tail(self.path)

    def write(self, round_: Round) -> None:
        """Append one round; it is on its way to the disk when this returns."""
        self._line({name: getattr(round_, name) for name in _FIELDS})

    def _line(self, values: dict[str, Any]) -> None:
        clean = {
            k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()
        }
        self._file.write(json.dumps(clean, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_trace(path: str | Path) -> Trace:
    """Read a trace file written by `TraceWriter`.

    A truncated last line (a crash in mid-write) is dropped with a warning.

    Raises
    ------
    TraceError
        If the file is no trace, of an unknown version, or a line is damaged.
    """
    path = Path(path)
    header = _read_header(path)
    return Trace(header, list(iter_rounds(path, header)))


def iter_rounds(path: Path, header: TraceHeader) -> Iterator[Round]:
    """The rounds of a trace file, one at a time, in bounded memory."""
    with path.open(encoding="utf-8") as file:
        next(file)
        for number, line in enumerate(file, start=2):
            if not line.endswith("\n"):
                warnings.warn(
                    f"{path}: the last line ({number}) is cut off, as after a crash; it is dropped",
                    stacklevel=2,
                )
                return
            yield _parse_round(path, number, line, header)


def _read_header(path: Path) -> TraceHeader:
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        values = json.loads(first)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TraceError(f"{path} is no trace: its first line is not a {FORMAT!r} header")
    if values.get("version") != VERSION:
        raise TraceError(
            f"{path} has trace version {values.get('version')!r}; this release reads {VERSION}"
        )
    try:
        return TraceHeader(
            tuple(values["arms"]),
            values["draft_length"],
            values["policy"],
            values["reward"],
            values.get("meta", {}),
        )
    except KeyError as missing:
        raise TraceError(f"{path}: the header lacks {missing}") from None


def _parse_round(path: Path, number: int, line: str, header: TraceHeader) -> Round:
    try:
        values = json.loads(line)
    except ValueError:
        raise TraceError(f"{path}:{number} is not JSON; remove or repair the line") from None
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise TraceError(f"{path}:{number} lacks {', '.join(missing)}")
    unknown = sorted(values.keys() - set(_FIELDS))
    if unknown:
        raise TraceError(f"{path}:{number} has unknown fields {', '.join(unknown)}")
    for name in _NAN_FIELDS & values.keys():
        if values[name] is None:
            values[name] = math.nan
    if not 0 <= values["arm"] < len(header.arms):
        raise TraceError(
            f"{path}:{number} names arm {values['arm']}, but the header has {len(header.arms)} arms"
        )
    if values.get("rewards") is not None:
        values["rewards"] = tuple(values["rewards"])
    return Round(**values)


def _drop_torn_tail(path: Path) -> None:
    """Cut a last line without its newline, so that appending does not weld two lines together."""
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
