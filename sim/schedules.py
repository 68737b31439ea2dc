"""Schedules: which domain of the text a round meets, and when that changes.

A domain is a row of the acceptance model's rates. The law of each schedule stands in its class;
all are oblivious: what a policy does never changes what the text holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from sim.acceptance.base import Place

__all__ = ["Adversarial", "Drifting", "MarkovSwitching", "Piecewise", "Schedule", "Stationary"]


class Timetable(NamedTuple):
    """Changes of domain as compiled code reads them.

    Whether positions count tokens (else rounds); after how many positions all begins anew (0:
    never); and the positions `starts` (S,) where the `domains` (S,) begin.
    """

    by_tokens: bool
    period: int
    starts: NDArray[np.int64]
    domains: NDArray[np.int64]


class Chain(NamedTuple):
    """A Markov chain as compiled code reads it.

    `moves` (D + 1, D): cumulative probabilities of the next domain, row D those of the first.
    """

    moves: NDArray[np.float64]


@kernel
def stay(table, t, tokens, before, stream):
    return Place(t, 0, 0, 0.0)


@kernel
def position_of(table, t, tokens):
    """Where the timetable stands: the position, and the last m with starts[m] <= position."""
    position = tokens if table.by_tokens else t
    if table.period > 0:
        position %= table.period
    low, high = 0, table.starts.size
    while high - low > 1:
        middle = (low + high) // 2
        if table.starts[middle] <= position:
            low = middle
        else:
            high = middle
    return position, low


@kernel
def jump(table, t, tokens, before, stream):
    _, now = position_of(table, t, tokens)
    return Place(t, table.domains[now], table.domains[now], 0.0)


@kernel
def drift(table, t, tokens, before, stream):
    position, now = position_of(table, t, tokens)
    domain = table.domains[now]
    if now == table.starts.size - 1:
        return Place(t, domain, domain, 0.0)
    span = table.starts[now + 1] - table.starts[now]
    return Place(t, domain, table.domains[now + 1], (position - table.starts[now]) / span)


@kernel
def wander(chain, t, tokens, before, stream):
    row = before.domain if t > 0 else chain.moves.shape[0] - 1
    u, domain = uniform(stream), 0
    while domain < chain.moves.shape[1] - 1 and u >= chain.moves[row, domain]:
        domain += 1
    return Place(t, domain, domain, 0.0)


class Schedule(ABC):
    """Base of the schedules: a table, and a function over it that becomes part of the loop.

    ``place(table, t, tokens, before, stream) -> Place``: where round t stands, `tokens` tokens
    into the text, the last round's place given.
    """

    drifts: ClassVar[bool] = False
    place: ClassVar[Callable[..., Any]]

    @abstractmethod
    def table(self, n_domains: int) -> Any:
        """What `place` reads, for a model of `n_domains` domains, checked against it."""


@dataclass(frozen=True)
class Stationary(Schedule):
    """Domain 0 throughout."""

    place = staticmethod(stay)

    def table(self, n_domains: int) -> tuple[()]:
        return ()


def _timetable(
    starts: Sequence[int], domains: Sequence[int], n_domains: int, unit: str, period: int
) -> Timetable:
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
    positions, rows = np.asarray(starts, dtype=np.int64), np.asarray(domains, dtype=np.int64)
    return Timetable(unit == "tokens", period, positions, rows)


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
    place = staticmethod(jump)

    def table(self, n_domains: int) -> Timetable:
        return _timetable(self.starts, self.domains, n_domains, self.unit, self.period)


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
    place = staticmethod(drift)

    def table(self, n_domains: int) -> Timetable:
        return _timetable(self.starts, self.domains, n_domains, self.unit, self.period)


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
    place = staticmethod(wander)

    def table(self, n_domains: int) -> Chain:
        checks.number("stay", self.stay, 0.0, 1.0)
        moves = np.full((n_domains + 1, n_domains), 1.0 / n_domains)
        if n_domains > 1:
            moves[:-1] = (1.0 - self.stay) / (n_domains - 1)
            np.fill_diagonal(moves[:-1], self.stay)
        return Chain(moves.cumsum(1))


@dataclass(frozen=True)
class Adversarial(Schedule):
    """Round t has domain ``order[t mod len(order)]``, fixed in advance by an adversary.

    Parameters
    ----------
    order : sequence of int
        Any sequence of domains; `sim.arms.against_ucb` computes one that fools UCB.
    """

    order: Sequence[int]
    place = staticmethod(jump)

    def table(self, n_domains: int) -> Timetable:
        starts = list(range(len(self.order)))
        return _timetable(starts, self.order, n_domains, "rounds", len(self.order))
