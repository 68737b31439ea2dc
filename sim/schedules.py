"""Schedules: which domain of the text a round meets, and when that changes.

A domain is a row of the acceptance model's rates. The law of each schedule stands in its class;
all are oblivious: what a policy does never changes what the text holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.stream import uniform
from sim.acceptance.base import Place

__all__ = ["Adversarial", "Drifting", "MarkovSwitching", "Piecewise", "Schedule", "Stationary"]

_STATIONARY, _PIECEWISE, _DRIFTING, _MARKOV = range(4)


class Timetable(NamedTuple):
    """A schedule as compiled code reads it.

    `kind`; whether positions count tokens (else rounds); after how many positions all begins anew
    (0: never); the positions `starts` (S,) where the `domains` (S,) begin; and `moves` (D, D), the
    cumulative probabilities of a Markov chain's next domain, row D the ones of its first.
    """

    kind: int
    by_tokens: bool
    period: int
    starts: NDArray[np.int64]
    domains: NDArray[np.int64]
    moves: NDArray[np.float64]


@njit
def span_of(starts, position):
    """The last m with starts[m] <= position, by bisection."""
    low, high = 0, starts.size
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@njit
def place(table, t, tokens, before, stream):
    """Where round t stands, `tokens` tokens into the text, the last round's place given."""
    if table.kind == _STATIONARY:
        return Place(t, 0, 0, 0.0)
    if table.kind == _MARKOV:
        row = before.domain if t > 0 else table.moves.shape[0] - 1
        u, domain = uniform(stream), 0
        while domain < table.moves.shape[1] - 1 and u >= table.moves[row, domain]:
            domain += 1
        return Place(t, domain, domain, 0.0)
    position = tokens if table.by_tokens else t
    if table.period > 0:
        position %= table.period
    now = span_of(table.starts, position)
    domain = table.domains[now]
    if table.kind == _PIECEWISE or now == table.starts.size - 1:
        return Place(t, domain, domain, 0.0)
    span = table.starts[now + 1] - table.starts[now]
    return Place(t, domain, table.domains[now + 1], (position - table.starts[now]) / span)


class Schedule(ABC):
    """Base of the schedules."""

    drifts = False

    @abstractmethod
    def timetable(self, n_domains: int) -> Timetable:
        """The schedule for a model of `n_domains` domains, checked against it."""


def _table(kind: int, starts: Any = (0,), domains: Any = (0,), **rest: Any) -> Timetable:
    return Timetable(
        kind,
        rest.get("by_tokens", False),
        rest.get("period", 0),
        np.asarray(starts, dtype=np.int64),
        np.asarray(domains, dtype=np.int64),
        rest.get("moves", np.zeros((1, 1))),
    )


@dataclass(frozen=True)
class Stationary(Schedule):
    """Domain 0 throughout."""

    def timetable(self, n_domains: int) -> Timetable:
        return _table(_STATIONARY)


def _check_points(
    starts: Sequence[int], domains: Sequence[int], n_domains: int, unit: str, period: int
) -> None:
    checks.choice("unit", unit, ("rounds", "tokens"))
    checks.integer("period", period, 0)
    if len(starts) != len(domains) or len(starts) == 0:
        raise checks.ConfigError(
            f"starts has {len(starts)} positions for {len(domains)} domains; give one each"
        )
    for domain in domains:
        checks.integer("domains", domain, 0, n_domains - 1)
    for start in starts:
        checks.integer("starts", start, 0)
    if starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
        raise checks.ConfigError(f"starts={list(starts)} must begin with 0 and increase")


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Domain ``domains[m]`` from position ``starts[m]`` on, with change points between.

    Parameters
    ----------
    starts, domains : sequence of int, same length
        Positions (the first is 0, increasing) and the domain that begins there.
    unit : {"rounds", "tokens"}, default "rounds"
        What positions count. Tokens suit texts that change topic; rounds suit the bandit
        literature (Garivier and Moulines 2011).
    period : int, default 0
        Begin anew after so many positions; 0 never does.
    """

    starts: Sequence[int]
    domains: Sequence[int]
    unit: str = "rounds"
    period: int = 0

    def timetable(self, n_domains: int) -> Timetable:
        _check_points(self.starts, self.domains, n_domains, self.unit, self.period)
        by_tokens = self.unit == "tokens"
        return _table(
            _PIECEWISE, self.starts, self.domains, by_tokens=by_tokens, period=self.period
        )


@dataclass(frozen=True)
class Drifting(Schedule):
    """Rates move linearly from domain to domain, reaching ``domains[m]`` at ``starts[m]``.

    Parameters as for `Piecewise`; after the last position the rates stay. Needs a model whose
    rates can be interpolated (`IID`, `Clustered`).
    """

    starts: Sequence[int]
    domains: Sequence[int]
    unit: str = "rounds"
    period: int = 0
    drifts = True

    def timetable(self, n_domains: int) -> Timetable:
        _check_points(self.starts, self.domains, n_domains, self.unit, self.period)
        by_tokens = self.unit == "tokens"
        return _table(_DRIFTING, self.starts, self.domains, by_tokens=by_tokens, period=self.period)


@dataclass(frozen=True)
class MarkovSwitching(Schedule):
    """The domain is a Markov chain over rounds, started from its stationary law.

    Parameters
    ----------
    stay : float, default 0.95
        In [0, 1]: probability of keeping the domain for one more round; another one, each equally
        likely, follows otherwise. The stationary law is uniform; a domain lasts 1 / (1 - stay)
        rounds on average.
    """

    stay: float = 0.95

    def timetable(self, n_domains: int) -> Timetable:
        checks.number("stay", self.stay, 0.0, 1.0)
        moves = np.full((n_domains + 1, n_domains), 1.0 / n_domains)
        if n_domains > 1:
            moves[:-1] = (1.0 - self.stay) / (n_domains - 1)
            np.fill_diagonal(moves[:-1], self.stay)
        return _table(_MARKOV, moves=moves.cumsum(1))


@dataclass(frozen=True)
class Adversarial(Schedule):
    """Round t has domain ``order[t mod len(order)]``, fixed in advance by an adversary.

    Parameters
    ----------
    order : sequence of int
        Any sequence of domains; `sim.arms.against_ucb` computes one that fools UCB.
    """

    order: Sequence[int]

    def timetable(self, n_domains: int) -> Timetable:
        starts = range(len(self.order))
        _check_points(starts, self.order, n_domains, "rounds", len(self.order))
        return _table(_PIECEWISE, list(starts), self.order, period=len(self.order))
