"""How a replayed policy does over the rounds of a query: reward, regret and arm shares, with bands.

Queries are dealt into at most 64 groups by their number; each group gives one curve, and the
band, Student's, comes from the spread between groups. With one query the runs of different seeds
take the place of groups. A policy that learns across queries has no band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from metasd_bandits.policy import Policy
from metasd_bandits.replay.full import Scope, Source, decisions, scoped
from metasd_bandits.replay.results import learns_across, policy_text
from metasd_bandits.traces.columns import Reader, open_trace

__all__ = ["Curve", "Curves", "replay_curves"]

GROUPS = 64
PLACES = 200


@dataclass(frozen=True)
class Curve:
    """A mean and its pointwise band, each (P,); the band is NaN where nothing tells it."""

    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """One policy over rounds.

    Attributes
    ----------
    policy : str
    rounds : (P,) array
        Rounds of a query at which the curves are given (each the end of a bin).
    reward : Curve
        Mean reward from the query's first round to this one.
    regret : Curve
        Cumulated reward lost to the arm that is best on the whole trace.
    shares : (P, K) array
        How the rounds of the bin are shared among arms.
    best_arm : int
    """

    policy: str
    rounds: NDArray[np.float64]
    reward: Curve
    regret: Curve
    shares: NDArray[np.float64]
    best_arm: int


def replay_curves(
    source: Source,
    policy: str | Policy,
    *,
    scope: Scope = "query",
    seeds: Sequence[int] = (0,),
    level: float = 0.95,
) -> Curves:
    """Curves of a policy in full replay; raises as `metasd_bandits.replay.full.full_replay`.

    Parameters
    ----------
    source, policy, scope, seeds
        As in `full_replay`; each seed is one pass over the trace.
    level : float
        Pointwise coverage of the bands.
    """
    reader, policy = open_trace(source), scoped(policy, scope)
    n_queries, longest, best = _shape(reader)
    by_query = n_queries > 1
    width = math.ceil(longest / PLACES)
    K, G = len(reader.header.arms), GROUPS if by_query else len(seeds)
    P = math.ceil(longest / width)
    n, reward, lost = (np.zeros((G, P)) for _ in range(3))
    shares = np.zeros((P, K))
    for run, seed in enumerate(seeds):
        place = _Places()
        for batch, arms in decisions(reader, policy, scope=scope, seed=seed):
            each = np.arange(len(arms))
            x = place.of(batch.query) // width
            group = batch.query % GROUPS if by_query else np.full(len(arms), run)
            cell, table = group * P + x, batch.per_arm["rewards"]
            got = table[arms, each]
            lacking = np.nan_to_num(table[best] - got)  # a round without the best arm loses nothing
            for sums, values in ((n, None), (reward, got), (lost, lacking)):
                sums += np.bincount(cell, values, minlength=G * P).reshape(G, P)
            shares += np.bincount(x * K + arms, minlength=P * K).reshape(P, K)
    level = math.nan if learns_across(policy) else level
    with np.errstate(invalid="ignore"):
        return Curves(
            policy_text(policy),
            np.minimum(np.arange(1, P + 1) * width, longest).astype(float),
            _band(np.cumsum(reward / n, axis=1) / np.arange(1, P + 1), level),
            _band(np.cumsum(lost / n, axis=1) * width, level),
            shares / shares.sum(axis=1, keepdims=True),
            best,
        )


class _Places:
    """Each round's place within its query, carried from batch to batch."""

    def __init__(self) -> None:
        self._query, self._next = -1, 0

    def of(self, query: NDArray[np.int64]) -> NDArray[np.int64]:
        each = np.arange(len(query))
        fresh = np.diff(query, prepend=self._query) != 0
        begin = np.maximum.accumulate(np.where(fresh, each, -self._next))
        place = each - begin
        self._query, self._next = int(query[-1]), int(place[-1]) + 1
        return np.asarray(place)


def _shape(reader: Reader) -> tuple[int, int, int]:
    """Queries, the longest one's rounds, and the arm of the largest mean reward."""
    K = len(reader.header.arms)
    place, longest, queries = _Places(), 0, 0
    totals, n = np.zeros(K), np.zeros(K)
    for batch in reader.batches(("rewards",)):
        longest = max(longest, int(place.of(batch.query).max()) + 1)
        queries = max(queries, int(batch.query.max()) + 1)
        rewards = batch.full("rewards")
        if rewards is not None:
            totals += np.nansum(rewards, axis=1)
            n += (~np.isnan(rewards)).sum(axis=1)
    return queries, max(longest, 1), int(np.argmax(totals / np.maximum(n, 1.0)))


def _band(groups: NDArray[np.float64], level: float) -> Curve:
    """Mean over groups that have the place, and a Student band; NaN of one group or no level."""
    there = np.isfinite(groups)
    G = np.maximum(there.sum(axis=0), 1)
    mean = np.where(there, groups, 0.0).sum(axis=0) / G
    spread = np.where(there, (groups - mean) ** 2, 0.0).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = student.ppf((1.0 + level) / 2.0, G - 1) * np.sqrt(spread / (G - 1) / G)
    half = np.where(G > 1, half, math.nan)
    return Curve(mean, mean - half, mean + half)
