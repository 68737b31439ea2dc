"""Trace files: one JSON line per round, appended as decoding goes, a versioned header first.

Line 1 is the header, ``{"format": "metasd-trace", "version": 1, "arms": [...], ...}``; every
other line is one `Round`. NaN is written as null, so that every line is strict JSON.

Two faults are repaired, each with a warning that names the line: a last line cut off by a crash
is dropped, and a second header that agrees with the first (two files joined end to end) is
skipped. Everything else is an error. An arm may be written as its place or as its name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metasd_bandits import checks
from metasd_bandits.round import Node, Round

__all__ = [
    "FORMAT",
    "VERSION",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TraceWriter",
    "header_from_json",
    "header_to_json",
    "iter_rounds",
    "read_header",
    "read_trace",
]

FORMAT = "metasd-trace"
VERSION = 1
_FIELDS = [f.name for f in dataclasses.fields(Round)]
_REQUIRED = [f.name for f in dataclasses.fields(Round) if f.default is dataclasses.MISSING]
_NAN_FIELDS = ("propensity", "step")
_PER_ARM = {"rewards": float, "tokens": int, "steps": float}
_COUNTS = ("index", "drafted", "accepted", "emitted", "owed", "depth")
_NUMBERS = ("block_efficiency", "block_divergence", "reward", "propensity", "step")


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
            require_same(read_header(self.path), header, str(self.path))
            _mend_tail(self.path)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if fresh:
            self._file.write(header_to_json(header) + "\n")
            self._file.flush()

    def write(self, round_: Round) -> None:
        """Append one round; it is on its way to the disk when this returns."""
        values = {name: _nulls_for_nan(getattr(round_, name)) for name in _FIELDS}
        self._file.write(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_trace(path: str | Path) -> Trace:
    """Read a JSON Lines trace file into memory.

    A truncated last line (a crash in mid-write) is dropped with a warning.

    Raises
    ------
    TraceError
        If the file is no trace, of an unknown version, or a line is damaged.
    """
    path = Path(path)
    header = read_header(path)
    return Trace(header, list(iter_rounds(path, header)))


def iter_rounds(path: Path, header: TraceHeader) -> Iterator[Round]:
    """The rounds of a JSON Lines trace file, one at a time, in bounded memory."""
    with path.open(encoding="utf-8") as file:
        next(file)
        for number, line in enumerate(file, start=2):
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise TraceError(f"{where} is not JSON; remove or repair the line") from None
                _repaired(f"{where}: the last line is cut off, as after a crash; it is dropped")
                return
            if isinstance(values, dict) and values.get("format") == FORMAT:
                require_same(header_from_json(line, where), header, where)
                _repaired(f"{where}: a second header, equal to the first, is skipped")
                continue
            yield _parse_round(where, values, header)


def read_header(path: str | Path) -> TraceHeader:
    """The header of a JSON Lines trace file."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return header_from_json(file.readline(), str(path))


def header_to_json(header: TraceHeader) -> str:
    """A header as its one line of JSON, the version in it."""
    values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(header)}
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def header_from_json(text: str, where: str) -> TraceHeader:
    """The inverse of `header_to_json`; `where` stands in the messages."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TraceError(f"{where} is no trace: its first line is not a {FORMAT!r} header")
    if values.get("version") != VERSION:
        raise TraceError(
            f"{where} has trace version {values.get('version')!r}; this release reads {VERSION}"
        )
    try:
        arms = tuple(values["arms"])
        header = TraceHeader(
            arms, values["draft_length"], values["policy"], values["reward"], values.get("meta", {})
        )
    except KeyError as missing:
        raise TraceError(f"{where}: the header lacks {missing}") from None
    if not arms or len(set(arms)) < len(arms) or not all(isinstance(a, str) for a in arms):
        raise TraceError(f"{where}: arms={list(arms)!r} must be different names, at least one")
    return header


def require_same(theirs: TraceHeader, mine: TraceHeader, where: str) -> None:
    """Raise `TraceError` unless two headers describe rounds that may stand in one file."""
    pairs = [(n, getattr(theirs, n), getattr(mine, n)) for n in ("arms", "draft_length", "reward")]
    pairs.append(("proposers", theirs.meta.get("proposers"), mine.meta.get("proposers")))
    for name, a, b in pairs:
        if a != b:
            raise TraceError(
                f"{where} holds a trace with {name}={a!r}, not {b!r}; keep them in two files"
            )


def _parse_round(where: str, values: Any, header: TraceHeader) -> Round:
    if not isinstance(values, dict):
        raise TraceError(f"{where} is not a JSON object; remove or repair the line")
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise TraceError(f"{where} lacks {', '.join(missing)}")
    unknown = sorted(values.keys() - set(_FIELDS))
    if unknown:
        raise TraceError(f"{where} has unknown fields {', '.join(unknown)}")
    for name in _NAN_FIELDS:
        if values.get(name, 0.0) is None:
            values[name] = math.nan
    if isinstance(values["arm"], str):
        values["arm"] = arm_index(where, values["arm"], header)
    for name, kind in _PER_ARM.items():
        if values.get(name) is not None:
            values[name] = _per_arm(where, name, values[name], kind, len(header.arms))
    if values.get("nodes") is not None:
        values["nodes"] = _nodes(where, values["nodes"])
    _check_types(where, values)
    if not 0 <= values["arm"] < len(header.arms):
        raise TraceError(
            f"{where} names arm {values['arm']}, but the header has {len(header.arms)} arms"
        )
    return Round(**values)


def arm_index(where: str, name: str, header: TraceHeader) -> int:
    """The place of a named arm, or `TraceError` with the near match."""
    try:
        return header.arms.index(checks.choice("arm", name, header.arms))
    except checks.ConfigError as error:
        raise TraceError(f"{where}: {error}") from None


def _per_arm(where: str, name: str, items: Any, kind: type, n_arms: int) -> tuple[Any, ...]:
    if not isinstance(items, list) or len(items) != n_arms:
        raise TraceError(f"{where}: {name} must list one value for each of the {n_arms} arms")
    read = tuple(math.nan if x is None and kind is float else x for x in items)
    if not all(isinstance(x, (kind, int)) and not isinstance(x, bool) for x in read):
        raise TraceError(f"{where}: {name}={items!r} must hold numbers only")
    return tuple(kind(x) for x in read)


def _nodes(where: str, items: Any) -> tuple[Node, ...]:
    """The nodes of a block, each a list of its fields."""
    nodes = []
    for i, item in enumerate(items if isinstance(items, list) else [items]):
        try:
            token, parent, owners, chance, stood = item
            node = Node(token, parent, tuple(owners), float(chance), stood)
            good = -1 <= parent < i and 0.0 <= node.chance <= 1.0 and stood in (True, False, None)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise TraceError(
                f"{where}: nodes[{i}]={item!r} must be [token, parent before it or -1, owners, "
                "chance in [0, 1], true, false or null]"
            )
        nodes.append(node)
    return tuple(nodes)


def _check_types(where: str, values: dict[str, Any]) -> None:
    for name in ("arm", *_COUNTS):
        if type(values.get(name, 0)) is not int:
            raise TraceError(f"{where}: {name}={values[name]!r} is not an integer")
    for name in _NUMBERS:
        value = values.get(name, 0.0)
        if type(value) is int:
            values[name] = float(value)
        elif type(value) is not float:
            raise TraceError(f"{where}: {name}={value!r} is not a number")
    if not isinstance(values["query"], str):
        raise TraceError(f"{where}: query={values['query']!r} is not text")


def _nulls_for_nan(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_nulls_for_nan(x) for x in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _repaired(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _mend_tail(path: Path) -> None:
    """Make the file end in a whole line, so that appending does not weld two lines together."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while start and b"\n" not in tail:
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
        last = tail.rpartition(b"\n")[2]
        if not last:
            return
        try:
            json.loads(last)
        except ValueError:
            file.truncate(end - len(last))
        else:
            file.seek(end)
            file.write(b"\n")
