"""Trace files: one JSON line per round, appended as decoding goes, a versioned header first.

Line 1 is the header, ``{"format": "metasd-trace", "version": 1, "arms": [...], ...}``; every
other line is one `Round`. NaN is written as null, so that every line is strict JSON.

A file may hold several runs: each begins with a header, be it that a trace was continued or that
files were joined end to end. Queries of different runs are different queries. The second run's
query ``"0"`` is read as ``"0#2"`` where an earlier run had a ``"0"`` of its own.

A byte-order mark and blank lines are passed over. A last line cut off by a crash is dropped with a
warning. Everything else is an error. An arm may be written as its place or as its name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from metasd_bandits import checks
from metasd_bandits.round import Node, Round
from metasd_bandits.traces.fields import Field, Indexes, TraceError, fields_of, unrelated

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
_PER_ARM = ("rewards", "tokens", "steps")
_TOKEN, _OWNER = (Field(name, True, 0, 2**63 - 1) for name in ("token", "owner"))
_CHANCE = Field("chance", False, 0, 1)
_SCALARS = [name for name in _FIELDS if name not in ("query", "arm", "nodes", *_PER_ARM)]
_BOM = b"\xef\xbb\xbf"


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
        and reward is continued by another run, which has a header of its own.
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
        self._begun = False
        if fresh:
            self._begin()

    def write(self, round_: Round) -> None:
        """Append one round; it is on its way to the disk when this returns."""
        if not self._begun:
            self._begin()
        values = {name: _nulls_for_nan(getattr(round_, name)) for name in _FIELDS}
        self._file.write(json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def _begin(self) -> None:
        self._file.write(header_to_json(self.header) + "\n")
        self._file.flush()
        self._begun = True

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
    """The rounds of a JSON Lines trace file, one at a time, in bounded memory.

    Raises
    ------
    TraceError
        If a line is damaged, a value out of range, or a query has an index twice.
    """
    fields = fields_of(len(header.arms), header.draft_length)
    queries, run = _Queries(), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                values = _parsed(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise TraceError(
                        f"{where} is not JSON in UTF-8; remove or repair the line"
                    ) from None
                _repaired(f"{where}: the last line is cut off, as after a crash; it is dropped")
                return
            if isinstance(values, dict) and values.get("format") == FORMAT:
                require_same(_header(values, where), header, where)
                run += 1
                queries.begin_run(run)
                continue
            yield _parse_round(where, values, header, fields, queries)


class _Queries:
    """Gives the queries of each run names that no other run's have, and notes their rounds."""

    def __init__(self) -> None:
        self._run = 1
        self._numbers: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._indexes = Indexes()

    def begin_run(self, run: int) -> None:
        self._run = run
        self._names = {}

    def name(self, where: str, written: Any, index: int) -> str:
        """The query's name in the file as a whole, once (query, index) is known to be new."""
        if not isinstance(written, str):
            raise TraceError(f"{where}: query={reprlib.repr(written)} is not text")
        name = self._names.get(written)
        if name is None:
            name = self._new(where, written)
        if not self._indexes.add_one(self._numbers[name], index):
            raise TraceError(
                f"{where}: index={index} of query={written!r} is there already. Two queries of one "
                "name in one run cannot be told apart; where a second run begins here, repeat the "
                "header line before it"
            )
        return name

    def _new(self, where: str, written: str) -> str:
        if not _is_unicode(written):
            raise TraceError(f"{where}: query={written!r} is not text (a lone surrogate)")
        name = written
        while name in self._numbers:
            name = f"{name}#{self._run}"
        self._numbers[name] = len(self._numbers)
        self._names[written] = name
        return name


def _parsed(line: bytes) -> Any:
    """A line's JSON value; ValueError whatever is wrong with it."""
    try:
        return json.loads(line.removeprefix(_BOM).decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_header(path: str | Path) -> TraceHeader:
    """The first header of a JSON Lines trace file."""
    with Path(path).open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        values = _parsed(first)
    except ValueError:
        values = None
    return _header(values, str(path))


def header_to_json(header: TraceHeader) -> str:
    """A header as its one line of JSON, the version in it."""
    values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(header)}
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def header_from_json(text: str, where: str) -> TraceHeader:
    """The inverse of `header_to_json`; `where` stands in the messages."""
    try:
        values = _parsed(text.encode("utf-8"))
    except ValueError:
        values = None
    return _header(values, where)


def _header(values: Any, where: str) -> TraceHeader:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TraceError(f"{where} is no trace: its first line is not a {FORMAT!r} header")
    if values.get("version") != VERSION:
        raise TraceError(
            f"{where} has trace version {reprlib.repr(values.get('version'))}; this release reads "
            f"{VERSION}"
        )
    missing = [n for n in ("arms", "draft_length", "policy", "reward") if n not in values]
    if missing:
        raise TraceError(f"{where}: the header lacks {', '.join(missing)}")
    arms = values["arms"]
    if not isinstance(arms, list) or not arms or not all(map(_is_name, arms)):
        raise TraceError(
            f"{where}: arms={reprlib.repr(arms)} must be a list of names, at least one"
        )
    if len(set(arms)) < len(arms):
        raise TraceError(f"{where}: arms={arms!r} must be different names")
    length = Field("draft_length", True, 0, 2**31 - 1).read(where, values["draft_length"])
    for name in ("policy", "reward"):
        if not _is_name(values[name]):
            raise TraceError(f"{where}: {name}={reprlib.repr(values[name])} is not text")
    meta = values.get("meta", {})
    if not isinstance(meta, dict) or not _is_strict(meta):
        raise TraceError(f"{where}: meta={reprlib.repr(meta)} is not an object of strict JSON")
    return TraceHeader(tuple(arms), length, values["policy"], values["reward"], meta)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value)


def _is_strict(meta: dict[str, Any]) -> bool:
    try:
        json.dumps(meta, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def require_same(theirs: TraceHeader, mine: TraceHeader, where: str) -> None:
    """Raise `TraceError` unless two headers describe rounds that may stand in one file."""
    pairs = [(n, getattr(theirs, n), getattr(mine, n)) for n in ("arms", "draft_length", "reward")]
    pairs.append(("proposers", theirs.meta.get("proposers"), mine.meta.get("proposers")))
    for name, a, b in pairs:
        if a != b:
            raise TraceError(
                f"{where} holds a trace with {name}={a!r}, not {b!r}; keep them in two files"
            )


def _parse_round(
    where: str, values: Any, header: TraceHeader, fields: dict[str, Field], queries: _Queries
) -> Round:
    if not isinstance(values, dict):
        raise TraceError(f"{where} is not a JSON object; remove or repair the line")
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise TraceError(f"{where} lacks {', '.join(missing)}")
    unknown = sorted(values.keys() - set(_FIELDS))
    if unknown:
        raise TraceError(f"{where} has unknown fields {reprlib.repr(unknown)}")
    if isinstance(values["arm"], str):
        values["arm"] = arm_index(where, values["arm"], header)
    values["arm"] = fields["arm"].read(where, values["arm"])
    for name in _SCALARS:
        if name in values:
            values[name] = fields[name].read(where, values[name])
    for name in _PER_ARM:
        if values.get(name) is not None:
            values[name] = _per_arm(where, values[name], fields[name], len(header.arms))
    if values.get("nodes") is not None:
        values["nodes"] = _nodes(where, values["nodes"]) or None
    unrelated(where, values)
    values["query"] = queries.name(where, values["query"], values["index"])
    return Round(**values)


def arm_index(where: str, name: str, header: TraceHeader) -> int:
    """The place of a named arm, or `TraceError` with the near match."""
    try:
        return header.arms.index(checks.choice("arm", name, header.arms))
    except checks.ConfigError as error:
        raise TraceError(f"{where}: {error}") from None


def _per_arm(where: str, items: Any, field: Field, n_arms: int) -> tuple[Any, ...]:
    if not isinstance(items, list) or len(items) != n_arms:
        raise TraceError(
            f"{where}: {field.name}={reprlib.repr(items)} must list one value for each of the "
            f"{n_arms} arms"
        )
    return tuple(field.read(where, x) for x in items)


def _nodes(where: str, items: Any) -> tuple[Node, ...]:
    """The nodes of a block, each a list of its fields."""
    nodes = list[Node]()
    for i, item in enumerate(items if isinstance(items, list) else [items]):
        place = f"{where}: nodes[{i}]"
        try:
            token, parent, owners, chance, stood = item
            owners = tuple(_OWNER.read(place, owner) for owner in owners)
        except (TypeError, ValueError) as error:
            raise TraceError(
                f"{place}={reprlib.repr(item)} must be [token, parent, owners, chance, stood] "
                f"({error})"
            ) from None
        if type(stood) not in (bool, type(None)):
            raise TraceError(f"{place}: stood={reprlib.repr(stood)} must be true, false or null")
        parent = Field("parent", True, -1, i - 1).read(place, parent)
        nodes.append(
            Node(_TOKEN.read(place, token), parent, owners, _CHANCE.read(place, chance), stood)
        )
    return tuple(nodes)


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
            _parsed(last)
        except ValueError:
            file.truncate(end - len(last))
        else:
            file.seek(end)
            file.write(b"\n")
