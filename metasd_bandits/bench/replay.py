"""Replay throughput on a full-information Parquet trace: ``python -m metasd_bandits.bench.replay``.

Prints rounds per second for full replay (reading included), many seeds in one pass, rejection
replay and estimation, each as the best of three, by the wall clock and by CPU time.
"""

from __future__ import annotations

import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from metasd_bandits.replay.estimators import estimate
from metasd_bandits.replay.full import full_replay
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.traces.columns import open_trace
from metasd_bandits.traces.parquet import write_parquet
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader

GOAL = 5.0


def _best(job: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Million rounds per second of wall clock and of CPU time, the best of three after one."""
    job()  # compiles
    wall = cpu = 0.0
    for _ in range(3):
        w, c = time.perf_counter(), time.process_time()
        job()
        wall = max(wall, rounds / (time.perf_counter() - w) / 1e6)
        cpu = max(cpu, rounds / (time.process_time() - c) / 1e6)
    return wall, cpu


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of the trace.")] = 5_000_000,
    arms: Annotated[int, typer.Option(help="K.")] = 5,
) -> None:
    """Measure replay throughput."""
    alphas = tuple(0.3 + 0.4 * i / max(1, arms - 1) for i in range(arms))
    law = SyntheticLog(alphas=alphas, queries=rounds // 50, rounds=50)
    n = law.queries * law.rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        write_parquet(SyntheticReader(law), path)

        def read() -> None:
            for _ in open_trace(path).batches(("rewards", "tokens", "steps")):
                pass

        jobs: dict[str, tuple[Callable[[], object], int]] = {
            "reading alone": (read, n),
            "full replay, ucb": (lambda: full_replay(path, "ucb"), n),
            "full replay, exp3": (lambda: full_replay(path, "exp3"), n),
            "full replay, ucb, 8 seeds": (lambda: full_replay(path, "ucb", seeds=range(8)), 8 * n),
            "rejection replay, ucb": (lambda: rejection_replay(path, "ucb"), n),
            "estimation, all four": (lambda: estimate(path, "uniform"), n),
        }
        size = path.stat().st_size / 1e6
        table = Table(title=f"{n:,} rounds, K = {arms}, {size:.0f} MB; goal {GOAL:g} M rounds/s")
        table.add_column("job")
        table.add_column("M rounds/s", justify="right")
        table.add_column("per CPU-second", justify="right")
        for name, (job, count) in jobs.items():
            wall, cpu = _best(job, count)
            table.add_row(name, f"{wall:.1f}", f"{cpu:.1f}")
    console = Console(width=100)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    console.print(f"peak memory {peak:.0f} MB; {platform.processor() or platform.machine()}")


if __name__ == "__main__":
    typer.run(main)
