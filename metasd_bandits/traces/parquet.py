"""Traces for analysis: one Parquet column for each field of a round.

The header stands in the file's schema metadata under ``metasd-trace``, as in a JSON Lines trace.
``query`` and ``arm`` are dictionary-encoded text, so that any Parquet tool shows names; a
per-arm field is K flat columns, ``rewards.<arm>``, ``tokens.<arm>``, ``steps.<arm>``, null in
rounds without it, and absent where no round has it. NaN stays NaN: null always means None.

Damage is found: a checksum of the whole file stands between the data and the footer, where other
Parquet tools do not look, and is verified when the file is opened. Pages carry checksums as well,
for such tools and for the files that they rewrote. Rows are counted from 0 in messages.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from metasd_bandits.round import Round
from metasd_bandits.traces.columns import BATCH_ROWS, PER_ARM, SCALARS, Batch, Reader, open_trace
from metasd_bandits.traces.fields import RELATIONS, Indexes, fields_of, unrelated
from metasd_bandits.traces.jsonl import (
    FORMAT,
    Trace,
    TraceError,
    TraceHeader,
    TraceWriter,
    header_from_json,
    header_to_json,
)

__all__ = ["ParquetReader", "convert", "write_parquet"]

_KEY = FORMAT.encode()
_SEAL = b"metasdcrc"
_CHUNK = 1 << 20
_TEXT = pa.dictionary(pa.int32(), pa.string())
_ROW_GROUP = 131_072
_REQUIRED = ("query", "arm", "index", "drafted", "accepted", "emitted", "reward")


class ParquetReader(Reader):
    """Reads a Parquet trace in batches; memory does not grow with the number of rounds.

    Raises
    ------
    TraceError
        If the file is damaged or no Parquet trace, a column is missing or of a wrong type, or
        (while reading) a value is out of range or a query has an index twice.
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.query_names = []
        sealed = _check_seal(self.path)
        with self._named():
            schema = pq.read_schema(self.path)
            coded = [name for name in ("query", "arm") if name in schema.names]
            self._file = pq.ParquetFile(
                self.path,
                read_dictionary=coded,
                memory_map=True,
                page_checksum_verification=not sealed,
            )
            metadata = schema.metadata or {}
        if _KEY not in metadata:
            raise TraceError(
                f"{self.path} is no trace: its schema metadata has no {FORMAT!r} header; "
                "make traces with metasd-replay convert"
            )
        header = metadata[_KEY].decode("utf-8", errors="replace")
        self.header = header_from_json(header, str(self.path))
        self._fields = fields_of(len(self.header.arms), self.header.draft_length)
        self._unique = False  # whether (query, index) is known to be unique
        self.n_rounds = self._file.metadata.num_rows
        self._names = set(schema.names)
        self._check_columns()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever Arrow finds wrong with the file is a `TraceError`."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            raise TraceError(f"{self.path} is no readable Parquet file: {error}") from None

    def _check_columns(self) -> None:
        missing = [name for name in _REQUIRED if name not in self._names]
        allowed = {"query", *SCALARS}
        for name in PER_ARM:
            columns = {f"{name}.{arm}" for arm in self.header.arms}
            allowed |= columns
            if columns & self._names:
                missing += sorted(columns - self._names)
        if missing:
            raise TraceError(f"{self.path} lacks the column {', '.join(map(repr, missing))}")
        foreign = sorted(self._names - allowed)
        if foreign:
            raise TraceError(
                f"{self.path} has columns no round has: {', '.join(map(repr, foreign))}; "
                f"arms of the header: {', '.join(self.header.arms)}"
            )

    def batches(self, names: Collection[str], rows: int = BATCH_ROWS) -> Iterator[Batch]:
        absent = [n for n in names if n in SCALARS and n not in self._names]
        if absent:
            raise TraceError(f"{self.path} lacks the column {', '.join(map(repr, absent))}")
        wanted = ["query", *(n for n in SCALARS if n in names)]
        per_arm = [n for n in PER_ARM if n in names and f"{n}.{self.header.arms[0]}" in self._names]
        wanted += [f"{name}.{arm}" for name in per_arm for arm in self.header.arms]
        self.query_names.clear()
        ids: dict[str, int] = {}
        arms = {arm: i for i, arm in enumerate(self.header.arms)}
        indexes = None if self._unique else Indexes()
        extra = indexes is not None and "index" not in wanted
        records = self._records(rows, [*wanted, "index"] if extra else wanted)
        done = 0
        for record in records:
            column = dict(zip(record.schema.names, record.columns, strict=True))
            place = self._place(done)
            with self._named():
                batch = Batch(self._codes(column["query"], ids, "query"))
                new = islice(reversed(ids), len(ids) - len(self.query_names))
                self.query_names.extend(reversed(list(new)))
                for name in wanted[1 : len(wanted) - len(per_arm) * len(arms)]:
                    if name == "arm":
                        batch.columns[name] = self._codes(column[name], arms, "arm")
                    else:
                        batch.columns[name] = self._numbers(column[name], name, place)
                for name in per_arm:
                    self._per_arm(batch, name, column, place)
            self._check_relations(batch, place)
            if indexes is not None:
                index = batch.columns.get("index")
                if index is None:
                    index = self._numbers(column["index"], "index", place)
                self._check_new(indexes, batch.query, index, place)
            yield batch
            done += len(batch)
        self._unique = True

    def _records(self, rows: int, wanted: list[str]) -> Iterator[Any]:
        with self._named():
            records = self._file.iter_batches(rows, columns=wanted)
        while True:
            with self._named():
                record = next(records, None)
            if record is None:
                return
            yield record

    def _place(self, done: int) -> Callable[[int], str]:
        return lambda row: f"{self.path}, row {done + row}"

    def _check_relations(self, batch: Batch, place: Callable[[int], str]) -> None:
        for small, large, more in RELATIONS:
            if small in batch.columns and large in batch.columns:
                wrong = batch[small] > batch[large] + more
                if wrong.any():
                    row = int(wrong.argmax())
                    found = {n: batch[n][row].item() for n in (small, large)}
                    unrelated(place(row), {small: found[small], large: found[large]})

    def _check_new(
        self,
        indexes: Indexes,
        query: NDArray[np.int64],
        index: NDArray[np.int64],
        place: Callable[[int], str],
    ) -> None:
        row = indexes.add(query, index)
        if row is not None:
            raise TraceError(
                f"{place(row)}: index={index[row]} of query="
                f"{self.query_names[query[row]]!r} is there already; give each query of each run a "
                "name of its own"
            )

    def _codes(self, array: Any, ids: dict[str, int], name: str) -> NDArray[np.int64]:
        """Numbers for dictionary-encoded text; new queries are numbered, new arms refused."""
        if not pa.types.is_dictionary(array.type) or array.null_count:
            raise TraceError(f"{self.path}: column {name!r} must hold text, without nulls")
        codes = array.indices.to_numpy()
        if name == "query":
            return _numbered(codes, array.dictionary, ids)
        words = array.dictionary.to_pylist()
        foreign = sorted(set(words) - ids.keys())
        if foreign:
            raise TraceError(
                f"{self.path} names arm {foreign[0]!r}, which its header does not have: "
                f"{', '.join(ids)}"
            )
        return np.array([ids[word] for word in words], dtype=np.int64)[codes]

    def _numbers(self, array: Any, name: str, place: Callable[[int], str]) -> NDArray[Any]:
        if array.null_count:
            raise TraceError(
                f"{place(_first_null(array))}: column {name!r} holds nulls; NaN is written as NaN"
            )
        # a copy, for Arrow's is read-only
        return np.array(self._checked(array, name, name, place), dtype=SCALARS[name])

    def _checked(
        self, array: Any, column: str, name: str, place: Callable[[int], str]
    ) -> NDArray[Any]:
        """A column without nulls, of the right type, every value in range."""
        field = self._fields[name]
        whole = pa.types.is_integer(array.type)
        if not (whole or (pa.types.is_floating(array.type) and not field.whole)):
            kind = "integers" if field.whole else "numbers"
            value = array[0].as_py() if len(array) else None
            raise TraceError(
                f"{place(0)}: column {column!r} holds {array.type} ({value!r}), not {kind}"
            )
        values: NDArray[Any] = array.to_numpy()
        field.check(place, values)
        return values

    def _per_arm(
        self, batch: Batch, name: str, column: dict[str, Any], place: Callable[[int], str]
    ) -> None:
        arrays = [column[f"{name}.{arm}"] for arm in self.header.arms]
        nulls = {array.null_count for array in arrays}
        if nulls == {len(batch)}:
            return
        present = np.ones(len(batch), dtype=bool)
        if nulls != {0}:
            masks = [array.is_valid().to_numpy(zero_copy_only=False) for array in arrays]
            present = masks[0]
            if any((mask != present).any() for mask in masks):
                row = int(np.argmax(np.any([mask != present for mask in masks], axis=0)))
                raise TraceError(f"{place(row)}: {name} is null for some arms of a round only")
            arrays = [array.fill_null(0) for array in arrays]
        table = _pooled((len(arrays), len(batch)), PER_ARM[name])
        for row, array, arm in zip(table, arrays, self.header.arms, strict=True):
            row[:] = self._checked(array, f"{name}.{arm}", name, place)
        batch.per_arm[name], batch.present[name] = table, present


def _first_null(array: Any) -> int:
    return int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False)))


def _footer(path: Path) -> int | None:
    """Where a Parquet file's footer begins; None if its end is not one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
    if len(tail) < 8 or tail[4:] != b"PAR1":
        return None
    start = size - 8 - int.from_bytes(tail[:4], "little")
    return start if start >= 4 else None


def _checksum(path: Path, skip: tuple[int, int]) -> int:
    """CRC-32 of a file without the bytes start..stop."""
    total = 0
    with path.open("rb") as file:
        left = skip[0]
        while left and (chunk := file.read(min(_CHUNK, left))):
            total, left = zlib.crc32(chunk, total), left - len(chunk)
        file.seek(skip[1])
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    return total


def _check_seal(path: Path) -> bool:
    """Verify a file's checksum; False where it has none."""
    end, length = _footer(path), len(_SEAL) + 4
    if end is None or end <= length:
        return False
    with path.open("rb") as file:
        file.seek(end - length)
        seal = file.read(length)
    if not seal.startswith(_SEAL):
        return False
    (written,) = struct.unpack("<I", seal[len(_SEAL) :])
    if written != _checksum(path, (end - length, end)):
        raise TraceError(f"{path} is damaged: its bytes do not give its checksum; write it anew")
    return True


def _seal(path: Path) -> None:
    """Write the checksum of a whole Parquet file before its footer."""
    end = _footer(path)
    assert end is not None
    total = _checksum(path, (end, end))
    with path.open("rb+") as file:
        file.seek(end)
        footer = file.read()
        file.seek(end)
        file.write(_SEAL + struct.pack("<I", total) + footer)


def _pooled(shape: tuple[int, int], dtype: type[np.generic]) -> NDArray[Any]:
    """An array of any content from Arrow's pool, which keeps memory that the last batch freed."""
    memory = pa.allocate_buffer(math.prod(shape) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def _numbered(codes: NDArray[np.int32], dictionary: Any, ids: dict[str, int]) -> NDArray[np.int64]:
    """Queries numbered by first appearance; `ids` knows those before and takes the new ones.

    A query's rounds stand together, so what costs time is done once for each run of them.
    """
    starts = np.concatenate(([0], np.flatnonzero(codes[1:] != codes[:-1]) + 1))
    used, first, back = np.unique(codes[starts], return_index=True, return_inverse=True)
    words = dictionary.take(pa.array(used)).to_pylist()
    for place in np.argsort(first).tolist():
        ids.setdefault(words[place], len(ids))
    numbers = np.array([ids[word] for word in words], dtype=np.int64)[back]
    return np.repeat(numbers, np.diff(starts, append=len(codes)))


def write_parquet(
    source: str | Path | Trace | Reader, path: str | Path, compression: str = "lz4"
) -> int:
    """Write a trace as Parquet, batch by batch; returns the number of rounds.

    The file is written beside its name and renamed when whole.

    Parameters
    ----------
    source : path, Trace or Reader
        What `open_trace` takes.
    path : path-like
    compression : str, default "lz4"
        ``lz4`` reads fastest, ``zstd`` is smallest; any of Parquet's codecs.
    """
    reader = open_trace(source)
    path = Path(path)
    per_arm: list[str] = []
    temporary = beside(path)
    try:
        while True:  # once more for every per-arm field that turns up late
            written, late = _write_batches(reader, temporary, per_arm, compression)
            if not late:
                break
            per_arm += late
        _seal(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _write_batches(
    reader: Reader, path: Path, per_arm: list[str], compression: str
) -> tuple[int, list[str]]:
    """Write all rounds, or stop and name the per-arm fields that the schema lacks."""
    header = reader.header
    fields = [("query", _TEXT), ("arm", _TEXT)]
    fields += [(n, _arrow(dtype)) for n, dtype in SCALARS.items() if n != "arm"]
    fields += [(f"{n}.{arm}", _arrow(PER_ARM[n])) for n in per_arm for arm in header.arms]
    schema = pa.schema(fields).with_metadata({_KEY: header_to_json(header).encode()})
    written = 0
    with pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        dictionary_pagesize_limit=2**18,  # few values are coded, continuous ones soon stored plain
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for batch in reader.batches((*SCALARS, *PER_ARM), _ROW_GROUP):
            late = [n for n in batch.per_arm if n not in per_arm]
            if late:
                return 0, late
            writer.write_table(_table(batch, schema, reader, per_arm))
            written += len(batch)
    return written, []


def _arrow(dtype: type[np.generic]) -> Any:
    return pa.int64() if dtype is np.int64 else pa.float64()


def _table(batch: Batch, schema: Any, reader: Reader, per_arm: list[str]) -> Any:
    used, codes = np.unique(batch.query, return_inverse=True)
    names = [reader.query_names[i] for i in used.tolist()]
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names)),
        pa.DictionaryArray.from_arrays(
            pa.array(batch["arm"].astype(np.int32)), pa.array(list(reader.header.arms))
        ),
    ]
    columns += [pa.array(batch[name]) for name in SCALARS if name != "arm"]
    for name in per_arm:
        for i in range(len(reader.header.arms)):
            if name not in batch.per_arm:
                columns.append(pa.nulls(len(batch), _arrow(PER_ARM[name])))
            else:
                mask = ~batch.present[name]
                columns.append(pa.array(batch.per_arm[name][i], mask=mask if mask.any() else None))
    return pa.Table.from_arrays(columns, schema=schema)


def beside(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def convert(source: str | Path | Trace | Reader, path: str | Path) -> int:
    """Store a trace in the format that the name asks for; returns the number of rounds.

    ``.parquet`` is Parquet, ``.jsonl`` JSON Lines; the content is the same, so that converting
    back and forth loses nothing.

    Raises
    ------
    TraceError
        If the ending is neither, or the source is damaged; nothing is left at `path` then.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return write_parquet(source, path)
    if path.suffix != ".jsonl":
        raise TraceError(f"{path}: end the name in .parquet or .jsonl to choose the format")
    reader = open_trace(source)
    return _write_lines(reader.header, reader.rounds(), path)


def _write_lines(header: TraceHeader, rounds: Iterator[Round], path: Path) -> int:
    temporary = beside(path)
    try:
        written = 0
        with TraceWriter(temporary, header) as writer:
            for round_ in rounds:
                writer.write(round_)
                written += 1
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return written
