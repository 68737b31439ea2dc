"""Read a benchmark's records, and how fast one method was beside another."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from metasd_bandits import Round, Trace, checks, read_trace
from metasd_bandits.intervals import Bootstrap
from metasd_bandits.traces.parquet import beside
from metasd_runtime.bench.run import FORMAT, RESULTS, TRACES, VERSION, Line

__all__ = ["Ratio", "Results", "View", "read_results", "speed_ratio", "task_of", "write_parquet"]

_FEWEST_PER_TASK = 4  # with fewer, resamples would lose whole tasks
_NOT_COLUMNS = ("output", "state")


class Ratio(NamedTuple):
    """A ratio of speeds with its 95 % interval; NaN where there are too few prompts to tell."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class View(NamedTuple):
    """The lines under one temperature, batch size and draft length, all seeds together.

    Attributes
    ----------
    name : str
        Says what distinguishes it from the suite's other views; empty if there is one only.
    temperature, batch, draft_length
    lines : list of dict
    """

    name: str
    temperature: float
    batch: int
    draft_length: int
    lines: list[Line]

    def of(self, method: str, task: str | None = None) -> list[Line]:
        """The lines of a method, on one task or on all."""
        return [
            line for line in self.lines if line["method"] == method and task in (None, line["task"])
        ]

    def methods(self, *kinds: str) -> list[str]:
        """Methods in the suite's order; of these kinds, where any are named."""
        chosen = (x["method"] for x in self.lines if not kinds or x["kind"] in kinds)
        return list(dict.fromkeys(chosen))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(line["task"] for line in self.lines))

    def best_single(self, task: str) -> str | None:
        """The fastest single drafter on a task, known in hindsight."""
        singles = self.methods("single")
        plain = self.of("plain", task)
        speeds = {name: speed_ratio(self.of(name, task), plain).value for name in singles}
        return max(speeds, key=lambda name: speeds[name]) if speeds else None

    def hindsight(self) -> list[Line]:
        """The lines of each task's best single drafter."""
        best = {task: self.best_single(task) for task in self.tasks}
        return [line for line in self.lines if line["method"] == best[line["task"]]]


class Results:
    """A benchmark's output folder, read.

    Attributes
    ----------
    folder : Path
    header : dict
        Suite, dtype, machine.
    lines : list of dict
        One for each answer, as `metasd_runtime.bench.run` writes them.
    """

    def __init__(self, folder: Path, header: Line, lines: list[Line]) -> None:
        self.folder, self.header, self.lines = folder, header, lines

    @property
    def suite(self) -> dict[str, Any]:
        return self.header["suite"]

    @property
    def finished(self) -> bool:
        return len(self.lines) == self.header["answers"]

    def unequal(self) -> list[Line]:
        """Greedy answers of ours in float32 that differ from plain decoding's: none may.

        (A compiled target's sums may differ in their last bits, so there a tie may.)
        """
        exact = self.header["dtype"] == "float32" and not self.suite["compiled"]
        ours = (x for x in self.lines if x["kind"] not in ("transformers", "peer"))
        return [line for line in ours if exact and line["difference"] is not None]

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """The traces by contender, of those that left one."""
        slugs = dict.fromkeys(line["slug"] for line in self.lines)
        paths = {slug: self.folder / TRACES / f"{slug}.jsonl" for slug in slugs}
        return {slug: read_trace(path) for slug, path in paths.items() if path.exists()}

    def rounds(self, lines: Iterable[Line]) -> Iterator[tuple[str, Round]]:
        """Rounds behind these lines, each with its drafter's name."""
        tasks: dict[str, set[str]] = defaultdict(set)
        for line in lines:
            tasks[line["slug"]].add(line["task"])
        for slug, wanted in tasks.items():
            if slug in self.traces:
                arms = self.traces[slug].header.arms
                for round_ in self.traces[slug]:
                    if task_of(round_) in wanted:
                        yield arms[round_.arm], round_

    def views(self) -> list[View]:
        """One for each temperature, batch size and draft length that was measured."""
        suite = self.suite
        made = []
        for temperature, batch, length in product(
            suite["temperatures"], suite["batches"], suite["draft_lengths"]
        ):
            told = {"temperatures": f"temperature {temperature:g}", "batches": f"batch {batch}"}
            told["draft_lengths"] = f"N = {length}"
            name = ", ".join(text for which, text in told.items() if len(suite[which]) > 1)
            lines = [x for x in self.lines if _in_view(x, temperature, batch, length)]
            if lines:
                made.append(View(name, temperature, batch, length, lines))
        return made


def task_of(round_: Round) -> str:
    """The task a round belongs to; queries are called task/number."""
    return round_.query.rpartition("/")[0]


def _in_view(line: Line, temperature: float, batch: int, draft_length: int) -> bool:
    same = (line["temperature"], line["batch"]) == (temperature, batch)
    return same and line["draft_length"] in (None, draft_length)


def read_results(folder: str | Path) -> Results:
    """Read what `metasd bench` wrote; a run that is not finished gives what it has.

    Raises
    ------
    ConfigError
        If the folder holds no results, or those of another version.
    """
    path = Path(folder) / RESULTS
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        raise checks.ConfigError(
            f"{folder} holds no {RESULTS}; give the folder that metasd bench wrote"
        ) from None
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    if not read or read[0].get("format") != FORMAT or read[0].get("version") != VERSION:
        raise checks.ConfigError(f"{path} is not of {FORMAT} version {VERSION}; run the suite anew")
    if len(read) == 1:
        raise checks.ConfigError(f"{path} holds no answer yet; let metasd bench go on first")
    return Results(Path(folder), read[0], read[1:])


def write_parquet(results: Results) -> Path:
    """The lines as ``results.parquet``, without the emitted tokens."""
    path = results.folder / "results.parquet"
    rows = [{k: v for k, v in x.items() if k not in _NOT_COLUMNS} for x in results.lines]
    temporary = beside(path)
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    os.replace(temporary, path)
    return path


def speed_ratio(mine: Sequence[Line], base: Sequence[Line]) -> Ratio:
    """Tokens per second of one method over another's; of several tasks, the tasks' mean.

    .. math::

       \\frac{1}{T} \\sum_t \\frac{\\sum_i n_{ti} / \\sum_i s_{ti}}
       {\\sum_i n'_{ti} / \\sum_i s'_{ti}}

    over the prompts that both answered, all seeds together. The interval resamples prompts, both
    methods' tokens and seconds together, and is Student's over prompts with 2 to 9 of them
    (`metasd_bandits.intervals.Bootstrap`); it needs two, and of several tasks four of each.

    Parameters
    ----------
    mine, base : sequences of lines
    """
    first, second = _sums(mine), _sums(base)
    prompts = [prompt for prompt in first if prompt in second]
    tasks = list(dict.fromkeys(task for task, _ in prompts))
    sums = np.zeros((len(prompts), len(tasks), 4))
    for i, prompt in enumerate(prompts):
        sums[i, tasks.index(prompt[0])] = [*first[prompt], *second[prompt]]

    def statistic(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        n, s, base_n, base_s = totals.reshape(-1, len(tasks), 4).transpose(2, 0, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return ((n / s) / (base_n / base_s)).mean(axis=1)

    if not prompts:
        return Ratio(np.nan, np.nan, np.nan)
    flat = sums.reshape(len(prompts), -1)
    value = float(statistic(flat.sum(axis=0))[0])
    rarest = min(sum(task == t for t, _ in prompts) for task in tasks)
    if len(tasks) > 1 and rarest < _FEWEST_PER_TASK:
        return Ratio(value, np.nan, np.nan)
    return Ratio(value, *Bootstrap(flat).interval(statistic))


def _sums(lines: Sequence[Line]) -> dict[tuple[str, str], tuple[float, float]]:
    """Tokens and seconds by task and prompt."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for line in lines:
        key = line["task"], line["prompt"]
        n, s = sums.get(key, (0.0, 0.0))
        sums[key] = n + line["tokens"], s + line["seconds"]
    return sums
