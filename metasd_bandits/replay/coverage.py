"""Trials of the estimators on logs whose truth is known: do their intervals cover it?

A full-information trace is taken for the whole world. Each trial draws some of its queries, lets a
logger pick one arm per round, forgets the others, estimates, and looks whether the interval
holds the target's worth in the whole trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metasd_bandits import checks
from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay.estimators import ESTIMATORS, Target, estimate, target_probabilities
from metasd_bandits.replay.full import Progress, Source
from metasd_bandits.traces.columns import Batch, ColumnReader, Reader, concatenated, open_trace

__all__ = ["interval_coverage"]


def interval_coverage(
    source: Source,
    target: Target = "uniform",
    *,
    levels: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    n_logs: int = 200,
    queries: int = 60,
    logger: ArrayLike | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Share of trial logs whose interval for reward per round holds the truth, by estimator.

    Parameters
    ----------
    source : path, Trace or Reader
        A full-information trace of many queries that fits into memory.
    target : as in `metasd_bandits.replay.estimators.estimate`
        Its probabilities must not depend on the round.
    levels : sequence of float
        Nominal coverages.
    n_logs, queries : int
        Trial logs, and queries drawn (with replacement) for each, at least 2.
    logger : (K,) array_like, optional
        The trial logger's probabilities; default uniform.
    seed : int
    progress : callable, optional
        Told 1 after each log.

    Returns
    -------
    dict of str to (len(levels),) array
    """
    reader = open_trace(source)
    checks.integer("queries", queries, 2)
    whole = concatenated(reader.batches(("rewards",)))
    rewards = whole.full("rewards")
    if rewards is None or np.isnan(rewards).any():
        raise ReplayError("trial logs need a trace with every arm's reward in every round")
    K, n = rewards.shape
    p = np.full(K, 1.0 / K) if logger is None else np.asarray(logger, dtype=float)
    pi = target_probabilities(target, reader)(whole)
    truth = float((pi * rewards).sum() / n)
    order = np.argsort(whole.query, kind="stable")
    bounds = np.flatnonzero(np.diff(whole.query[order], prepend=-1, append=n + 1))
    rows = [order[a:b] for a, b in pairwise(bounds)]
    rng = np.random.default_rng(seed)
    covered = {method: np.zeros(len(levels)) for method in ESTIMATORS}
    for trial in range(n_logs):
        log = _trial_log(reader, rewards, rows, queries, p, rng)
        for i, level in enumerate(levels):
            for e in estimate(log, target, level=level, seed=trial):
                if e.quantity == "reward per round":
                    covered[e.method][i] += e.low <= truth <= e.high
        if progress:
            progress(1)
    return {method: hits / n_logs for method, hits in covered.items()}


def _trial_log(
    reader: Reader,
    rewards: NDArray[np.float64],
    rows: list[NDArray[np.int64]],
    queries: int,
    p: NDArray[np.float64],
    rng: np.random.Generator,
) -> ColumnReader:
    drawn = [rows[i] for i in rng.integers(0, len(rows), queries)]
    at = np.concatenate(drawn)
    arm = np.minimum(np.searchsorted(np.cumsum(p), rng.random(len(at)), side="right"), len(p) - 1)
    batch = Batch(np.repeat(np.arange(queries), [len(r) for r in drawn]))
    batch.columns = {
        "arm": arm,
        "reward": rewards[arm, at],
        "propensity": p[arm],
        "emitted": np.ones(len(at), dtype=np.int64),
        "step": np.full(len(at), np.nan),
    }
    return ColumnReader(reader.header, batch)
