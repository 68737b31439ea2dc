"""Traces as columns: batches of NumPy arrays, whatever the rounds are stored in.

Analysis reads a trace once, front to back, in batches of bounded size. A `Reader` gives the
header and those batches; a Parquet file, a JSON Lines file, a list of rounds and a simulated log
all have one, and everything behind this line (replay, estimation, summaries) sees `Batch` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_bandits.round import Round
from metasd_bandits.traces.jsonl import Trace, TraceError, TraceHeader, iter_rounds, read_header

__all__ = [
    "BATCH_ROWS",
    "PER_ARM",
    "SCALARS",
    "Batch",
    "ColumnReader",
    "Reader",
    "RoundReader",
    "ahead",
    "batch_of",
    "by_query",
    "concatenated",
    "open_trace",
    "rounds_of",
]

BATCH_ROWS = 32_768  # the columns of five arms fit a processor's cache
SCALARS: dict[str, type[np.generic]] = {
    "arm": np.int64,
    "index": np.int64,
    "drafted": np.int64,
    "accepted": np.int64,
    "emitted": np.int64,
    "block_efficiency": np.float64,
    "block_divergence": np.float64,
    "reward": np.float64,
    "propensity": np.float64,
    "draft_seconds": np.float64,
    "verify_seconds": np.float64,
    "switch_seconds": np.float64,
    "owed": np.int64,
    "step": np.float64,
    "depth": np.int64,
}
PER_ARM: dict[str, type[np.generic]] = {
    "rewards": np.float64,
    "tokens": np.int64,
    "steps": np.float64,
}


@dataclass
class Batch:
    """Consecutive rounds as arrays.

    Attributes
    ----------
    query : (n,) int64
        Each round's query, numbered by first appearance in the trace.
    columns : dict of str to (n,) array
        The scalar fields of `Round` that were asked for.
    per_arm : dict of str to (K, n) array
        Those of ``rewards``, ``tokens``, ``steps`` that were asked for and are present.
    present : dict of str to (n,) bool
        Which rounds carry each of `per_arm`.
    """

    query: NDArray[np.int64]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    per_arm: dict[str, NDArray[Any]] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.query)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def full(self, name: str) -> NDArray[Any] | None:
        """A per-arm field if *every* round carries it, else None."""
        values = self.per_arm.get(name)
        return values if values is not None and bool(self.present[name].all()) else None

    def slice(self, start: int, stop: int) -> Batch:
        """Rounds start..stop of the batch, as views."""
        part = slice(start, stop)
        return Batch(
            self.query[part],
            {name: values[part] for name, values in self.columns.items()},
            {name: values[:, part] for name, values in self.per_arm.items()},
            {name: values[part] for name, values in self.present.items()},
        )


class Reader(ABC):
    """A trace that can be read front to back, as often as needed."""

    header: TraceHeader
    n_rounds: int | None = None
    query_names: list[str]

    @abstractmethod
    def batches(self, names: Collection[str], rows: int = BATCH_ROWS) -> Iterator[Batch]:
        """The trace in batches of at most `rows` rounds, with the named fields of `Round`.

        `query` is always there; `query_names` maps its numbers to names as far as was read.
        """

    def rounds(self) -> Iterator[Round]:
        """The trace round by round."""
        for batch in self.batches((*SCALARS, *PER_ARM)):
            yield from rounds_of(batch, self.query_names)


class RoundReader(Reader):
    """Reader over rounds that come one by one.

    Parameters
    ----------
    header : TraceHeader
    rounds : callable
        Gives a fresh iterator over the rounds each time.
    n_rounds : int, optional
    """

    def __init__(
        self,
        header: TraceHeader,
        rounds: Callable[[], Iterator[Round]],
        n_rounds: int | None = None,
    ) -> None:
        self.header, self._rounds, self.n_rounds = header, rounds, n_rounds
        self.query_names = []

    def rounds(self) -> Iterator[Round]:
        return self._rounds()

    def batches(self, names: Collection[str], rows: int = BATCH_ROWS) -> Iterator[Batch]:
        self.query_names.clear()
        ids: dict[str, int] = {}
        rounds = self.rounds()
        while chunk := list(islice(rounds, min(rows, 32_768))):
            yield batch_of(chunk, len(self.header.arms), names, ids, self.query_names)


class ColumnReader(Reader):
    """Reader over one batch that is in memory already (a simulated log).

    Parameters
    ----------
    header : TraceHeader
    batch : Batch
        All rounds; its `query` numbers must follow first appearance.
    query_names : list of str, optional
        Default: ``q0``, ``q1``, ...
    """

    def __init__(
        self, header: TraceHeader, batch: Batch, query_names: list[str] | None = None
    ) -> None:
        self.header, self._batch, self.n_rounds = header, batch, len(batch)
        n_queries = int(batch.query.max()) + 1 if len(batch) else 0
        self.query_names = query_names or [f"q{i}" for i in range(n_queries)]

    def batches(self, names: Collection[str], rows: int = BATCH_ROWS) -> Iterator[Batch]:
        missing = [n for n in names if n in SCALARS and n not in self._batch.columns]
        if missing:
            raise TraceError(f"this log has no column {', '.join(missing)}")
        for start in range(0, len(self._batch), rows):
            yield self._batch.slice(start, start + rows)


def open_trace(source: str | Path | Trace | Reader) -> Reader:
    """A reader for a trace: a path (Parquet or JSON Lines, told by content), or one in memory.

    Raises
    ------
    TraceError
        If the file is no trace.
    OSError
        If it cannot be opened.
    """
    if isinstance(source, Reader):
        return source
    if isinstance(source, Trace):
        return RoundReader(source.header, source.rounds.__iter__, len(source))
    path = Path(source)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"PAR1":
        header = read_header(path)
        return RoundReader(header, lambda: iter_rounds(path, header))
    from metasd_bandits.traces.parquet import ParquetReader  # pyarrow is slow to import

    return ParquetReader(path)


def ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the next one read by another thread while this one is used."""
    with ThreadPoolExecutor(1) as reader:
        pending = reader.submit(next, batches, None)
        while (batch := pending.result()) is not None:
            pending = reader.submit(next, batches, None)
            yield batch


def batch_of(
    rounds: list[Round],
    n_arms: int,
    names: Collection[str],
    ids: dict[str, int],
    query_names: list[str],
) -> Batch:
    """Rounds turned into columns; `ids` and `query_names` carry the numbering of queries on."""
    for r in rounds:
        if r.query not in ids:
            ids[r.query] = len(ids)
            query_names.append(r.query)
    batch = Batch(np.array([ids[r.query] for r in rounds], dtype=np.int64))
    for name, dtype in SCALARS.items():
        if name in names:
            batch.columns[name] = np.array([getattr(r, name) for r in rounds], dtype=dtype)
    for name, dtype in PER_ARM.items():
        if name not in names:
            continue
        values = [getattr(r, name) for r in rounds]
        present = np.array([v is not None for v in values])
        if present.any():
            nothing = (0,) * n_arms
            table = np.array([nothing if v is None else v for v in values], dtype=dtype)
            batch.per_arm[name] = np.ascontiguousarray(table.T)
            batch.present[name] = present
    return batch


def rounds_of(batch: Batch, query_names: list[str]) -> Iterator[Round]:
    """The inverse of `batch_of`; the batch must hold every scalar field."""
    scalars = {name: batch[name].tolist() for name in SCALARS}
    tables = {name: values.T.tolist() for name, values in batch.per_arm.items()}
    present = {name: flags.tolist() for name, flags in batch.present.items()}
    for t, query in enumerate(batch.query.tolist()):
        fields: dict[str, Any] = {name: values[t] for name, values in scalars.items()}
        for name, rows in tables.items():
            if present[name][t]:
                fields[name] = tuple(rows[t])
        yield Round(query=query_names[query], **fields)


def by_query(reader: Reader) -> Reader:
    """The trace sorted so that each query's rounds stand together, in the order of their index.

    Queries keep the order in which they began. The whole trace is held in memory.
    """
    whole = concatenated(reader.batches((*SCALARS, *PER_ARM)))
    order = np.lexsort((whole["index"], whole.query))
    whole.query = whole.query[order]
    whole.columns = {name: values[order] for name, values in whole.columns.items()}
    whole.per_arm = {name: values[:, order] for name, values in whole.per_arm.items()}
    whole.present = {name: values[order] for name, values in whole.present.items()}
    return ColumnReader(reader.header, whole, list(reader.query_names))


def concatenated(batches: Iterable[Batch]) -> Batch:
    """One batch out of several; for traces known to be small."""
    parts = list(batches)
    if not parts:
        return Batch(np.zeros(0, dtype=np.int64))
    whole = Batch(np.concatenate([b.query for b in parts]))
    for name in parts[0].columns:
        whole.columns[name] = np.concatenate([b[name] for b in parts])
    for name in {name for b in parts for name in b.per_arm}:
        shape = next(b.per_arm[name] for b in parts if name in b.per_arm)
        k, dtype = shape.shape[0], shape.dtype
        whole.per_arm[name] = np.concatenate(
            [b.per_arm.get(name, np.zeros((k, len(b)), dtype)) for b in parts], axis=1
        )
        whole.present[name] = np.concatenate(
            [b.present.get(name, np.zeros(len(b), bool)) for b in parts]
        )
    return whole
