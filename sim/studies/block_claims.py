"""What docs/theory.md says of blocks, as lines: statement, interval, threshold, verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from metasd_bandits import blocks
from metasd_bandits.theory.bounds import cascade_upper
from sim.report import Interval, mean_interval
from sim.several import CUTS, Drafter, Several
from sim.studies.blocks import Merger

__all__ = ["Line", "allocation", "block_lines", "calibrated", "regret"]

Z = 4.5  # standard errors that an observed chance may be off; seeds are fixed
Allocate = Callable[[Sequence[int], Sequence[float], int], list[int]]


class Line(NamedTuple):
    """A statement, what simulation found, the threshold, and ``holds`` or ``fails``."""

    statement: str
    interval: Interval
    threshold: str
    verdict: str


def block_lines(seed: int = 0) -> list[Line]:
    """All lines."""
    return [allocation(seed=seed), regret(seed=seed), calibrated(seed=seed)]


def allocation(allocate: Allocate = blocks.allocate, *, trees: int = 150, seed: int = 0) -> Line:
    """Theorem 4 against every closed set of random trees of up to 9 nodes."""
    rng = np.random.default_rng(seed)
    lost = []
    for _ in range(trees):
        n = int(rng.integers(1, 10))
        parents = [int(rng.integers(-1, i)) for i in range(n)]
        chances, budget = rng.random(n).tolist(), int(rng.integers(1, n + 1))
        w = blocks.path_chances(parents, chances)
        kept = allocate(parents, chances, budget)
        closed = all(parents[i] < 0 or parents[i] in kept for i in kept)
        best = _most(parents, w, budget)
        lost.append(best - sum(w[i] for i in kept) if closed else math.inf)
    worst = max(lost)
    found = Interval(worst, min(lost), worst)
    return _line("no closed set of nodes brings more", found, "<= 1e-12", worst <= 1e-12)


def _most(parents: Sequence[int], w: Sequence[float], budget: int) -> float:
    return max(
        sum(w[i] for i in s)
        for s in itertools.combinations(range(len(w)), budget)
        if all(parents[i] < 0 or parents[i] in s for i in s)
    )


def regret(
    policy: Callable[[], blocks.SetPolicy] | None = None,
    *,
    rounds: int = 5000,
    runs: int = 4,
    seed: int = 0,
) -> Line:
    """Theorem 6 for two drafters' chains of two tokens, of which two are verified."""
    make = policy or (lambda: blocks.BlockUCB(blocks.Calibrator("ab", strength=0.0, bonus=3.0)))
    chances = [0.9, 0.1, 0.9, 0.1]  # roots a and b exclude each other; then a child each
    candidates = blocks.Candidates([-1, -1, 0, 1], [[0], [1], [0], [1]], [0, 1, 0, 1])
    w = blocks.path_chances(candidates.parents, chances)
    best = _most(candidates.parents, w, 2)
    gap = best - (w[0] + w[1])  # the second best block has both roots
    lost = []
    for child in np.random.SeedSequence(seed).spawn(runs):
        learner, total = make(), 0.0
        for u, v in np.random.default_rng(child).random((rounds, 2)):
            kept = learner.select(candidates, 2)
            total += best - sum(w[i] for i in kept)
            roots = [u < chances[0], u >= chances[0]]
            stood = [*roots, roots[0] and v < chances[2], roots[1] and v < chances[3]]
            learner.update(
                candidates, kept, [bool(x) if i in kept else None for i, x in enumerate(stood)]
            )
        lost.append(total)
    found = mean_interval(lost)
    bound = cascade_upper(2, 2, rounds, depth=2, gap=gap)
    return _line(
        "BlockUCB's regret is below its bound", found, f"<= {bound:.0f}", found.high <= bound
    )


def calibrated(merger: type[Merger] = Merger, *, rounds: int = 2500, seed: int = 0) -> Line:
    """Chances learned from cascades against the closed form of the simulator's law."""
    drafter = Drafter((0.6,), (1.0,), length=5, noise=0.6)
    model = Several([drafter])
    player = merger(model, 5, 0.0, uses=[0])
    for proposals in model.rounds(rounds, seed):
        player.play(proposals)
    state = player.known.state_dict()
    off, ok = [], True
    for level in range(len(CUTS) + 1):
        key, truth = 4 * level + 2, drafter.chance(level)  # of the chain, proposed by one
        n = state["seen"][key]
        error, half = state["stood"][key] / n - truth, Z * math.sqrt(truth * (1.0 - truth) / n)
        off.append(Interval(error, error - half, error + half))
        ok = ok and abs(error) <= half
    worst = max(off, key=lambda cell: abs(cell.value) / (cell.high - cell.low))
    return _line("chances learned are the true ones", worst, f"0 within {Z} errors", ok)


def _line(statement: str, found: Interval, threshold: str, holds: bool) -> Line:
    return Line(statement, found, threshold, "holds" if holds else "fails")
