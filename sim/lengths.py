"""Output lengths B: fixed, or random because a text ends when the target says so."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks

__all__ = ["Empirical", "EndOfText", "Fixed", "Lengths", "make_lengths"]

_LONGEST = 10**12


class Lengths(ABC):
    """A law of B on the integers from 1 on, given by its quantiles."""

    @abstractmethod
    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        """B at each u in [0, 1)."""


@dataclass(frozen=True)
class Fixed(Lengths):
    """Always `tokens`, at least 1."""

    tokens: int

    def __post_init__(self) -> None:
        checks.integer("tokens", self.tokens, 1, _LONGEST)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(u.shape, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class EndOfText(Lengths):
    """Each token ends the text with probability 1 / mean: B geometric, cut at `longest`.

    Parameters
    ----------
    mean : float
        Mean length before the cut, at least 1.
    longest : int
        The limit on new tokens.
    """

    mean: float
    longest: int = 1_000_000

    def __post_init__(self) -> None:
        checks.number("mean", self.mean, 1.0)
        checks.integer("longest", self.longest, 1, _LONGEST)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        if self.mean == 1.0:
            return np.ones(u.shape, dtype=np.int64)
        B = 1 + np.floor(np.log1p(-u) / math.log1p(-1.0 / self.mean))
        return np.minimum(B, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Empirical(Lengths):
    """One of the given lengths, each equally likely."""

    values: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.values) == 0:
            raise checks.ConfigError("values is empty; give at least one length")
        for value in self.values:
            checks.integer("values", value, 1, _LONGEST)

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.int64]:
        values = np.asarray(self.values, dtype=np.int64)
        return values[(u * values.size).astype(np.int64)]


def make_lengths(lengths: int | Lengths) -> Lengths:
    """`Lengths` as they are; an integer as `Fixed`."""
    return lengths if isinstance(lengths, Lengths) else Fixed(lengths)
