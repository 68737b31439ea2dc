"""Estimates with intervals: sums kept by independent unit, resampled together.

Whatever is estimated here is a function of sums over rounds (reward, tokens, weights, the number
of rounds). Rounds of one query depend on each other, so sums are kept by query and whole queries
are resampled; numerator and denominator of a ratio always come from the same resample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import t as student

__all__ = ["Bootstrap", "Estimate", "ReplayError", "UnitSums"]

MOST_UNITS = 2048
FEWEST_UNITS = 10
ONE_QUERY = "one query: the interval takes its rounds as units and tells of this query alone"

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class ReplayError(ValueError):
    """The log cannot answer the question; the message says why and what would."""


@dataclass(frozen=True)
class Estimate:
    """One number about a policy, with what is needed to judge it.

    Attributes
    ----------
    quantity : str
        ``reward per round``, ``tokens per round``, ``rounds to B tokens``, ...
    value, low, high : float
        The estimate and its confidence interval; the interval is NaN where the log has too few
        independent units to tell, as where a policy learns across all of it.
    level : float
        The interval's nominal coverage, in (0, 1).
    method : str
        What made it: ``full``, ``rejection``, ``runs``, or an estimator's name.
    unit, n_units
        What was resampled (query, block of rounds, run), and how many there were.
    rounds, accepted : int
        Rounds of the log that were read, and those that entered the estimate.
    effective : float
        Effective sample size (sum w)^2 / sum w^2, in rounds.
    largest_weight : float
        The largest importance weight; 1 where rounds are not weighted.
    notes : tuple of str
        What a reader should know before believing the number.
    """

    quantity: str
    value: float
    low: float
    high: float
    level: float
    method: str
    unit: str
    n_units: int
    rounds: int
    accepted: int
    effective: float
    largest_weight: float = 1.0
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: NaN and infinity become None."""
        values = dataclasses.asdict(self)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }

    def __str__(self) -> str:
        return f"{self.quantity}: {self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


class UnitSums:
    """Sums of C quantities by unit, in bounded memory.

    Units are numbered 0, 1, ... by the caller; once there are more than `most`, neighbours are
    pooled in pairs (batch means), which stays valid for independent units and also for a slowly
    mixing sequence.
    """

    def __init__(self, n_columns: int, most: int = MOST_UNITS) -> None:
        self._sums = np.zeros((most, n_columns))
        self._width, self._used = 1, 0

    def add(self, ids: NDArray[np.int64], *columns: NDArray[Any] | float) -> None:
        """Add one value per round and column to the rounds' units; ids may come in any order."""
        if not len(ids):
            return
        self.room_for(int(ids.max()))
        places = ids // self._width
        first = int(places.min())
        places -= first
        for c, column in enumerate(columns):
            weights = np.broadcast_to(np.asarray(column, dtype=np.float64), ids.shape)
            sums = np.bincount(places, weights)
            self._sums[first : first + len(sums), c] += sums

    def room_for(self, largest: int) -> tuple[NDArray[np.float64], int]:
        """The sums, one row for `width` units each, with room for unit `largest`; and the width."""
        most = len(self._sums)
        while largest // self._width >= most:
            self._sums[: most // 2] = self._sums[0::2] + self._sums[1::2]
            self._sums[most // 2 :] = 0.0
            self._width *= 2
            self._used = (self._used + 1) // 2
        self._used = max(self._used, int(largest) // self._width + 1)
        return self._sums, self._width

    @property
    def sums(self) -> NDArray[np.float64]:
        """One row per unit, shape (U, C)."""
        return self._sums[: self._used]


class Bootstrap:
    """Resampled totals, drawn once, from which any number of intervals can be read.

    Parameters
    ----------
    sums : (U, C) array
        Sums by independent unit; units are drawn with replacement.
    level : float
        Nominal coverage.
    seed : int
        Of the resampling.
    resamples : int

    Notes
    -----
    Bias-corrected and accelerated intervals, Efron (1987), "Better bootstrap confidence
    intervals"; the acceleration comes from leaving out one unit at a time. Tails are those of
    Student's law, widened by sqrt(U / (U - 1)), without which few units make short intervals
    (Hesterberg 2015, "What teachers should know about the bootstrap").
    """

    def __init__(
        self, sums: NDArray[np.float64], level: float = 0.95, seed: int = 0, resamples: int = 999
    ) -> None:
        self._sums, self._level = sums, level
        U = len(sums)
        rng = np.random.default_rng(seed)
        self._totals = np.empty((resamples if U >= FEWEST_UNITS else 0, sums.shape[1]))
        for r in range(0, len(self._totals), 100):
            part = self._totals[r : r + 100]
            drawn = rng.integers(0, U, (len(part), U)) + U * np.arange(len(part))[:, None]
            counts = np.bincount(drawn.ravel(), minlength=part.shape[0] * U).reshape(-1, U)
            part[:] = counts @ sums

    def interval(self, statistic: Statistic) -> tuple[float, float]:
        """The interval of a function of totals, (R, C) -> (R,); NaN with one unit.

        With 2 to 9 units it is Student's, U - 1 degrees of freedom, around the estimate, with the
        jackknife's variance (few resamples differ, so that a bootstrap would be too short).
        """
        U = len(self._sums)
        total = self._sums.sum(axis=0)
        value = float(statistic(total[None])[0])
        if U < 2:
            return math.nan, math.nan
        if not len(self._totals):
            left_out = statistic(total - self._sums)
            error = math.sqrt((U - 1) / U * float(((left_out - left_out.mean()) ** 2).sum()))
            half = float(student.ppf((1.0 + self._level) / 2.0, U - 1)) * error
            return value - half, value + half
        draws = statistic(self._totals)
        draws = np.sort(draws[np.isfinite(draws)])
        if not len(draws) or draws[0] == draws[-1]:
            return value, value
        below = (np.sum(draws < value) + 0.5 * np.sum(draws == value)) / len(draws)
        bias = ndtri(np.clip(below, 0.5 / len(draws), 1.0 - 0.5 / len(draws)))
        jackknife = statistic(total - self._sums)
        spread = jackknife.mean() - jackknife
        scale = float((spread**2).sum()) ** 1.5
        acceleration = float((spread**3).sum()) / (6.0 * scale) if scale > 0.0 else 0.0
        tail = (1.0 - self._level) / 2.0
        wide = math.sqrt(U / (U - 1)) * student.ppf(1.0 - tail, U - 1)
        z = bias + np.array([-wide, wide])
        low, high = np.quantile(draws, ndtr(bias + z / (1.0 - acceleration * z)))
        return float(low), float(high)
