"""Decision latency and simulation speed, beside other libraries.

Run it by ``python -m metasd_bandits.bench.decisions``.
Everything is timed in one run on one machine. Peers run in an environment of their own, whose
Python is named by ``--peers``; without it, ours alone are timed.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numba import njit
from rich.console import Console
from rich.table import Table

from metasd_bandits.bench import engine_template, peer_process
from metasd_bandits.bench.peer_process import best_microseconds
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.compiled.stream import make_stream
from metasd_bandits.registry import make_policy

__all__ = ["main"]

POLICIES = ("ucb", "kl-ucb", "exp3", "thompson")
MEANS = np.array([0.3, 0.4, 0.5, 0.6, 0.7])


@njit
def bare_ucb(T, means):
    K = means.size
    n, mean = np.zeros(K), np.zeros(K)
    for t in range(T):
        best, arm = -1.0, min(t, K - 1)
        wide = math.sqrt(2.0 * math.log(max(t, 1)))
        for i in range(K):
            if t >= K and mean[i] + wide / math.sqrt(n[i]) > best:
                best, arm = mean[i] + wide / math.sqrt(n[i]), i
        reward = 1.0 if np.random.random() < means[arm] else 0.0  # noqa: NPY002
        n[arm] += 1.0
        mean[arm] += (reward - mean[arm]) / n[arm]
    return n


@njit
def bare_exp3(T, means):
    K = means.size
    w, p = np.zeros(K), np.zeros(K)
    for _ in range(T):
        top, total = w.max(), 0.0
        for i in range(K):
            p[i] = math.exp(w[i] - top)
            total += p[i]
        u, reached, arm = np.random.random(), 0.0, K - 1  # noqa: NPY002
        for i in range(K):
            p[i] = 0.9 * p[i] / total + 0.1 / K
            if reached <= u < reached + p[i]:
                arm = i
            reached += p[i]
        reward = 1.0 if np.random.random() < means[arm] else 0.0  # noqa: NPY002
        w[arm] += 0.1 / K * reward / p[arm]
    return w


@njit
def bare_thompson(T, means):
    K = means.size
    a, b = np.ones(K), np.ones(K)
    for _ in range(T):
        best, arm = -1.0, 0
        for i in range(K):
            x = np.random.beta(a[i], b[i])  # noqa: NPY002
            if x > best:
                best, arm = x, i
        reward = 1.0 if np.random.random() < means[arm] else 0.0  # noqa: NPY002
        a[arm] += reward
        b[arm] += 1.0 - reward
    return a


BARE = {"ucb": bare_ucb, "exp3": bare_exp3, "thompson": bare_thompson}


def latency(name: str, n_arms: int, decide: bool) -> float:
    """Microseconds of one select (or decide) + update from Python."""
    policy = make_policy(name)
    policy.reset(n_arms, seed=0)
    choose = (lambda: policy.decide().arm) if decide else policy.select
    return best_microseconds(lambda: policy.update(choose(), 0.5), 2 * n_arms)


def pulls_per_second(name: str, T: int = 20_000) -> tuple[float, float]:
    """Millions of simulated pulls per second at five arms: ours, and a loop written by hand."""
    policy = make_policy(name)
    assert isinstance(policy, CompiledPolicy)
    engine = specialise(engine_template, **policy.kernels())
    fresh, streams = policy.fresh_buffer(MEANS.size), (make_stream(1), make_stream(2))
    ours = best_microseconds(lambda: engine.pulls(fresh.copy(), *streams, MEANS, T), 1)
    bare = best_microseconds(lambda: BARE[name](T, MEANS), 1)
    return T / ours, T / bare


def latency_table(peers: Path | None) -> Table:
    table = Table(title="One decision from Python: microseconds for select + update")
    for column in ("policy", "5 arms", "1000 arms", "5 arms, with propensity"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name in POLICIES:
        row = [latency(name, 5, False), latency(name, 1000, False), latency(name, 5, True)]
        table.add_row(f"metasd {name}", *(f"{x:.2f}" for x in row))
    if peers is not None:
        done = subprocess.run(
            [str(peers), peer_process.__file__], capture_output=True, text=True, check=True
        )
        for library, by_arms in json.loads(done.stdout.splitlines()[-1]).items():
            cells = (x if isinstance(x, str) else f"{x:.2f}" for x in by_arms.values())
            table.add_row(f"{library} UCB", *cells, "-")
    return table


def speed_table() -> Table:
    table = Table(title="Simulated pulls at 5 arms: millions per second")
    for column in ("policy", "metasd kernels", "loop written by hand", "time, ours / by hand"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name in BARE:
        ours, bare = pulls_per_second(name)
        table.add_row(name, f"{ours:.1f}", f"{bare:.1f}", f"{bare / ours:.2f}")
    return table


def main(
    peers: Annotated[
        Path | None, typer.Option(help="Python of the environment with the peer libraries.")
    ] = None,
) -> None:
    """Time decisions and simulation, beside other libraries where --peers names their Python."""
    console = Console()
    console.print(latency_table(peers))
    console.print(speed_table())


if __name__ == "__main__":
    typer.run(main)
