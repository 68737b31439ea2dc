"""``python -m sim.bench``: simulated pulls and rounds per CPU-second, beside other libraries.

The job: K = 5 Bernoulli arms (.3, .4, .5, .6, .7), horizon 10,000, 200 replications, under UCB1,
EXP3 and Thompson sampling; and speculative decoding itself (K = 5, N = 5, MetaSD-UCB, independent
acceptance). Each measurement is repeated in turn (A B A B ...) and the median reported.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numba import njit
from rich.console import Console
from rich.table import Table

from sim.acceptance import IID
from sim.arms import Bernoulli
from sim.environment import Environment
from sim.simulate import simulate, simulate_bandit

MEANS = np.array([0.3, 0.4, 0.5, 0.6, 0.7])
HORIZON, REPLICATIONS, REPEATS = 10_000, 200, 5
OURS, BY_HAND = "metasd", "bare numba loop"
POLICIES = {"ucb": "ucb", "exp3": "exp3:gamma=0.1", "thompson": "thompson"}

Rates = dict[str, dict[str, Any]]  # who -> policy -> million pulls per CPU-second, or an error


@njit
def bare_ucb(horizon, replications, means):
    """UCB1 as one would write it by hand, without any interface."""
    K, total = means.size, 0.0
    for r in range(replications):
        np.random.seed(r)  # noqa: NPY002
        pulls, mean = np.zeros(K), np.zeros(K)
        for t in range(horizon):
            arm, best = t, 0.0
            if t >= K:
                arm, wide = 0, 2.0 * math.log(t)
                for i in range(K):
                    index = mean[i] + math.sqrt(wide / pulls[i])
                    if index > best:
                        arm, best = i, index
            reward = 1.0 if np.random.random() < means[arm] else 0.0  # noqa: NPY002
            pulls[arm] += 1.0
            mean[arm] += (reward - mean[arm]) / pulls[arm]
            total += reward
    return total


@njit
def bare_exp3(horizon, replications, means):
    """EXP3 by hand, in log-weights."""
    K, gamma, total = means.size, 0.1, 0.0
    for r in range(replications):
        np.random.seed(r)  # noqa: NPY002
        logs, p = np.zeros(K), np.zeros(K)
        for _ in range(horizon):
            top, mass = logs.max(), 0.0
            for i in range(K):
                p[i] = math.exp(logs[i] - top)
                mass += p[i]
            for i in range(K):
                p[i] = (1.0 - gamma) * p[i] / mass + gamma / K
            u, arm = np.random.random(), 0  # noqa: NPY002
            while arm < K - 1 and u >= p[arm]:
                u -= p[arm]
                arm += 1
            reward = 1.0 if np.random.random() < means[arm] else 0.0  # noqa: NPY002
            logs[arm] += gamma / K * reward / p[arm]
            total += reward
    return total


@njit
def bare_thompson(horizon, replications, means):
    """Beta-Bernoulli Thompson sampling by hand."""
    K, total = means.size, 0.0
    for r in range(replications):
        np.random.seed(r)  # noqa: NPY002
        won, lost = np.ones(K), np.ones(K)
        for _ in range(horizon):
            arm, best = 0, -1.0
            for i in range(K):
                draw = np.random.beta(won[i], lost[i])  # noqa: NPY002
                if draw > best:
                    arm, best = i, draw
            if np.random.random() < means[arm]:  # noqa: NPY002
                won[arm] += 1.0
                total += 1.0
            else:
                lost[arm] += 1.0
    return total


BARE = {"ucb": bare_ucb, "exp3": bare_exp3, "thompson": bare_thompson}


def rate(run: Callable[[], Any], amount: float, clock: Callable[[], float]) -> float:
    """Millions of `amount` per second of `clock`."""
    began = clock()
    run()
    return amount / (clock() - began) / 1e6


def pulls_per_second(peers: Path | None) -> list[Rates]:
    """Ours, the bare loop and the libraries in turn, `REPEATS` times: million pulls per CPU-second.

    `peers` is the Python of an environment that holds the libraries, if there is one.
    """
    jobs: dict[tuple[str, str], Callable[[], Any]] = {}
    arms = Bernoulli(MEANS)
    for name, written in POLICIES.items():
        jobs[OURS, name] = partial(
            simulate_bandit, arms, written, horizon=HORIZON, replications=REPLICATIONS
        )
        jobs[BY_HAND, name] = partial(BARE[name], HORIZON, REPLICATIONS, MEANS)
    for run in jobs.values():
        run()  # compile
    turns = []
    for _ in range(REPEATS):
        turn: Rates = {OURS: {}, BY_HAND: {}}
        for (who, name), run in jobs.items():
            turn[who][name] = rate(run, HORIZON * REPLICATIONS, time.process_time)
        turns.append(turn | (peer_rates(peers) if peers is not None else {}))
    return turns


def medians(turns: list[Rates]) -> Rates:
    """Who -> policy -> median over the turns; a library's error as it stands."""
    return {
        who: {
            name: value if name == "error" else statistics.median(t[who][name] for t in turns)
            for name, value in row.items()
        }
        for who, row in turns[0].items()
    }


def ratios(turns: list[Rates]) -> dict[str, dict[str, float]]:
    """Bare loop over ours and ours over the best library: medians of what each turn gives."""
    out: dict[str, dict[str, float]] = {BY_HAND + " / metasd": {}, "metasd / best library": {}}
    for name in POLICIES:
        slower = [t[BY_HAND][name] / t[OURS][name] for t in turns]
        out[BY_HAND + " / metasd"][name] = statistics.median(slower)
        libraries = [
            [t[w][name] for w in t if w not in (OURS, BY_HAND) and name in t[w]] for t in turns
        ]
        if all(libraries):
            gains = [t[OURS][name] / max(best) for t, best in zip(turns, libraries, strict=True)]
            out["metasd / best library"][name] = statistics.median(gains)
    return {row: values for row, values in out.items() if values}


def decoding_rates() -> dict[str, float]:
    """Rounds of simulated speculative decoding, and what two threads gain over one."""
    environment = Environment(IID(MEANS, 5), 2_000_000)

    def decode(threads: int) -> float:
        runs = simulate(environment, "ucb", replications=16, threads=threads)
        return float(runs.rounds.sum())

    rounds = decode(2)
    cpu, gain = [], []
    for _ in range(REPEATS):
        cpu.append(rate(lambda: decode(1), rounds, time.process_time))
        one = rate(lambda: decode(1), rounds, time.perf_counter)
        gain.append(rate(lambda: decode(2), rounds, time.perf_counter) / one)
    return {
        "million rounds per CPU-second": statistics.median(cpu),
        "two threads over one (wall)": statistics.median(gain),
    }


def memory_growth() -> float:
    """MiB of peak memory that a horizon a thousand times longer adds."""
    environment = [Environment(IID(MEANS, 5), B) for B in (10_000, 10_000_000)]
    peaks = []
    for each in environment:
        simulate(each, "ucb", replications=1)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peaks[1] - peaks[0]


_FIRST_CALL = """
import time
began = time.perf_counter()
from sim import IID, Environment, simulate
imported = time.perf_counter()
simulate(Environment(IID([.3, .4, .5, .6, .7], 5), 1000), "ucb", replications=1)
print(imported - began, time.perf_counter() - imported)
"""


def first_call_seconds() -> dict[str, float]:
    """The first simulation of a fresh process: nothing compiled yet, then from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"NUMBA_CACHE_DIR": f"{folder}/numba", "METASD_CACHE": f"{folder}/metasd"}
        seconds = {}
        for state in ("cold", "from cache"):
            out = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env={**os.environ, **paths, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds[f"first call, {state} (s)"] = float(out.stdout.split()[1])
        return seconds


def peer_rates(python: Path) -> Rates:
    """What the libraries in `python`'s environment reach, with a hundredth of the replications."""
    script = Path(__file__).with_name("bench_peers.py")
    command = [str(python), str(script), str(HORIZON), str(max(1, REPLICATIONS // 100))]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def show(console: Console, turns: list[Rates], single: dict[str, float]) -> None:
    """Print both tables and how the goals stand."""
    table = Table(title="Bernoulli arms: million pulls per CPU-second (median)")
    for column in ("", *POLICIES):
        table.add_column(column, justify="left" if not column else "right")
    for who, row in medians(turns).items():
        note = f" ({row['error']})" if "error" in row else ""
        cells = [f"{row[name]:.3f}" if name in row else "-" for name in POLICIES]
        table.add_row(who + note, *cells)
    for what, row in ratios(turns).items():
        digits = 2 if BY_HAND in what else 0
        table.add_row(what, *[f"{row.get(name, math.nan):.{digits}f}x" for name in POLICIES])
    console.print(table)
    other = Table(title="Speculative decoding: K = 5, N = 5, MetaSD-UCB, independent acceptance")
    other.add_column("")
    other.add_column("value", justify="right")
    for name, value in single.items():
        other.add_row(name, f"{value:.2f}")
    console.print(other)


def main(
    peers: Annotated[
        Path | None, typer.Option(help="Python of an environment that holds the other libraries.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how fast the simulator is, beside a bare loop and other libraries."""
    console = Console(stderr=as_json)
    turns = pulls_per_second(peers)
    single = {
        **decoding_rates(),
        "peak memory added by 1,000 times the horizon (MiB)": memory_growth(),
        **first_call_seconds(),
    }
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    if as_json:
        pulls = {"pulls": medians(turns), "ratios": ratios(turns)}
        print(json.dumps({"machine": machine, **pulls, "decoding": single}))
        return
    console.print(machine)
    show(console, turns, single)


if __name__ == "__main__":
    typer.run(main)
