"""Many simulations at once: on this machine's cores, or on a cluster, with the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from joblib import Parallel, delayed, parallel_config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metasd_bandits import checks
from metasd_bandits.policy import Policy
from sim.arms import Arms
from sim.environment import Environment
from sim.simulate import BanditRuns, Runs, simulate, simulate_bandit

__all__ = ["BanditTask", "Jobs", "Task"]

_BLOCKS = 8  # pieces of a task; part of no number, only of the balance between workers
_Result = TypeVar("_Result", Runs, BanditRuns)


@dataclass(frozen=True)
class Task:
    """One call of `simulate`."""

    environment: Environment
    policy: str | Policy
    replications: int
    options: dict[str, Any]

    def run(self, first: int, count: int) -> Runs:
        return simulate(
            self.environment, self.policy, replications=count, first=first, **self.options
        )


@dataclass(frozen=True)
class BanditTask:
    """One call of `simulate_bandit`."""

    arms: Arms
    policy: str | Policy
    replications: int
    options: dict[str, Any]

    def run(self, first: int, count: int) -> BanditRuns:
        return simulate_bandit(
            self.arms, self.policy, replications=count, first=first, **self.options
        )


@dataclass(frozen=True)
class Jobs:
    """Where simulations run.

    Parameters
    ----------
    count : int, default 1
        Worker processes on this machine; 1 runs in this process.
    backend : {"loky", "threading", "dask", "ray"}, default "loky"
        joblib's backend. ``dask`` uses the cluster at `scheduler`, or the client that is active;
        ``ray`` the cluster that Ray finds. How the work is split changes no number.
    scheduler : str, optional
        Address of a Dask scheduler, as in ``tcp://10.0.0.1:8786``.
    progress : bool, default False
        Show a progress bar on standard error.
    """

    count: int = 1
    backend: str = "loky"
    scheduler: str | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        checks.integer("jobs", self.count, 1)
        checks.choice("backend", self.backend, ("loky", "threading", "dask", "ray"))

    def run(self, tasks: Sequence[Any]) -> list[Any]:
        """The `Runs` or `BanditRuns` of each task, in order."""
        pieces = [(task, *piece) for task in tasks for piece in _blocks(task.replications)]
        done = self.map(_run_piece, pieces, "simulating")
        results, at = [], 0
        for task in tasks:
            n = len(_blocks(task.replications))
            results.append(_joined(done[at : at + n]))
            at += n
        return results

    def map(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], what: str
    ) -> list[Any]:
        """``[function(*a) for a in arguments]``, spread over the workers."""
        remote = self.backend in ("dask", "ray")
        with self._where(), self._bar(len(arguments), what) as advance:
            if self.count == 1 and not remote:
                made: Iterator[Any] = (function(*a) for a in arguments)
            else:
                # Ray's backend can only give all results at once, so that its bar jumps to the end
                kind = "list" if self.backend == "ray" else "generator"
                made = iter(Parallel(return_as=kind)(delayed(function)(*a) for a in arguments))
            results = []
            for result in made:
                results.append(result)
                advance()
        return results

    @contextlib.contextmanager
    def _where(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.backend == "dask" and self.scheduler is not None:
                from distributed import Client

                stack.enter_context(Client(self.scheduler))
            if self.backend == "ray":
                from ray.util.joblib import register_ray

                register_ray()
            n_jobs = -1 if self.backend in ("dask", "ray") else self.count
            stack.enter_context(parallel_config(backend=self.backend, n_jobs=n_jobs))
            yield

    @contextlib.contextmanager
    def _bar(self, total: int, what: str) -> Iterator[Callable[[], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with Progress(
            *columns, console=console, transient=True, disable=not self.progress
        ) as progress:
            bar = progress.add_task(what, total=total)
            yield lambda: progress.advance(bar)


def _run_piece(task: Task | BanditTask, first: int, count: int) -> Runs | BanditRuns:
    return task.run(first, count)


def _blocks(replications: int) -> list[tuple[int, int]]:
    edges = np.linspace(0, replications, min(_BLOCKS, replications) + 1).astype(int).tolist()
    return [(a, b - a) for a, b in pairwise(edges)]


def _joined(parts: Sequence[_Result]) -> _Result:
    """Rows of all parts, one below the other."""
    values = {}
    for field in dataclasses.fields(parts[0]):
        columns = [getattr(part, field.name) for part in parts]
        values[field.name] = columns[0] if field.name == "marks" else np.concatenate(columns)
    return type(parts[0])(**values)
