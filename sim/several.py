r"""Several drafters at once: who proposes what, how sure each is, and what the target says.

At depth d of a round the text has a latent difficulty :math:`z_d \sim N(0, 1)`, the same for all
drafters. Drafter i of rate :math:`\alpha_i` has the margin

.. math:: m_{id} = \Phi^{-1}(\alpha_i) - \sqrt\rho \, z_d - \sqrt{1 - \rho} \, e_{id}

with e standard normal (a Gaussian copula), and proposes the target's token where its margin is
positive: alone it is right at rate :math:`\alpha_i`, whatever rho. Drafters that are right agree;
of those that are wrong each falls for the same decoy with a given probability, else it has a token
of its own. Each shows how sure it is, :math:`s_{id} = m_{id} + \sigma_i e'_{id}`, cut at `CUTS`
into levels. A round is in one of several modes (copying or not, say), a Markov chain over
rounds. Ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from metasd_bandits import checks

__all__ = ["CUTS", "Drafter", "Proposal", "Several"]

CUTS = (-0.5, 0.25, 1.0)
RIGHT, DECOY = 0, 1  # tokens; drafter i's own ones are 2 + 2 i and, second choices, 3 + 2 i


@dataclass(frozen=True)
class Drafter:
    """One drafter.

    Parameters
    ----------
    rates : sequence of float
        Acceptance rate in each mode, inside (0, 1).
    present : sequence of float
        How often it proposes anything, in each mode, in [0, 1].
    length : int
        Tokens of its chain, at least 1.
    noise : float, default 0.5
        sigma, at least 0: 0 shows the margin itself.
    second : float, default 0.0
        How often a second choice beside each token of the chain is right where that is wrong, in
        [0, 1]; 0 has no second choices.
    cost : float, default 0.0
        Plain decoding steps for each token of the chain, at least 0.
    """

    rates: Sequence[float]
    present: Sequence[float]
    length: int
    noise: float = 0.5
    second: float = 0.0
    cost: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rates) != len(self.present) or not self.rates:
            raise checks.ConfigError(
                f"rates={self.rates!r} and present={self.present!r} must have a value for each mode"
            )
        for rate in self.rates:
            checks.number("rates", rate, 0.0, 1.0, open_low=True)
        if max(self.rates) == 1.0:
            raise checks.ConfigError(f"rates={self.rates!r} must be below 1")
        for share in self.present:
            checks.number("present", share, 0.0, 1.0)
        checks.integer("length", self.length, 1)
        checks.number("noise", self.noise, 0.0)
        checks.number("second", self.second, 0.0, 1.0)
        checks.number("cost", self.cost, 0.0)

    def chance(self, level: int, mode: int = 0) -> float:
        """P(a token is right | how sure the drafter is), in a mode; exact."""
        edges = [-np.inf, *CUTS, np.inf]
        t, s = stats.norm.ppf(self.rates[mode]), np.sqrt(1.0 + self.noise**2)
        law = stats.multivariate_normal([0.0, 0.0], [[1.0, 1.0 / s], [1.0 / s, 1.0]], True)
        low, high = (edges[level] - t) / s, (edges[level + 1] - t) / s
        inside = stats.norm.cdf(high) - stats.norm.cdf(low)
        wrong = _orthant(law, -t, high) - _orthant(law, -t, low)
        return float(1.0 - wrong / inside)


class Proposal(NamedTuple):
    """One drafter's tree in one round; empty where it proposes nothing.

    Attributes
    ----------
    parents, tokens : list of int, length n
        The chain comes first, then second choices; token 0 is the target's own.
    levels : list of int, length n
        How sure the drafter is of the chain's token (of the one beside, for second choices).
    """

    parents: list[int]
    tokens: list[int]
    levels: list[int]


@dataclass(frozen=True)
class Several:
    """Drafters whose acceptances depend on each other.

    Parameters
    ----------
    drafters : sequence of Drafter
        With equally many modes.
    correlation : float, default 0.5
        rho, in [0, 1]: of the drafters' margins at one position.
    decoy : float, default 0.3
        How often a wrong token is the one that others fall for too, in [0, 1].
    persistence : float, default 0.9
        How likely the next round keeps the mode, in [0, 1]; else it is drawn uniformly.
    """

    drafters: Sequence[Drafter]
    correlation: float = 0.5
    decoy: float = 0.3
    persistence: float = 0.9

    def __post_init__(self) -> None:
        if len({len(d.rates) for d in self.drafters}) != 1:
            raise checks.ConfigError("drafters must be at least one, all with as many modes")
        checks.number("correlation", self.correlation, 0.0, 1.0)
        checks.number("decoy", self.decoy, 0.0, 1.0)
        checks.number("persistence", self.persistence, 0.0, 1.0)

    def rounds(self, count: int, seed: int | np.random.SeedSequence) -> Iterator[list[Proposal]]:
        """`count` rounds, each with one `Proposal` a drafter."""
        rng = np.random.default_rng(seed)
        modes = self._modes(rng, count)
        longest = max(d.length for d in self.drafters)
        ease = np.sqrt(self.correlation) * rng.standard_normal((count, longest))
        drawn = [self._draw(rng, i, modes, ease) for i in range(len(self.drafters))]
        for r in range(count):
            yield [
                _tree(tokens[r], beside[r], levels[r]) if here[r] else Proposal([], [], [])
                for here, tokens, beside, levels in drawn
            ]

    def _modes(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        fresh = rng.integers(len(self.drafters[0].rates), size=count)
        renewed = rng.random(count) >= self.persistence
        renewed[:1] = True
        return np.asarray(fresh[np.maximum.accumulate(np.where(renewed, np.arange(count), 0))])

    def _draw(
        self,
        rng: np.random.Generator,
        i: int,
        modes: NDArray[np.int64],
        ease: NDArray[np.float64],
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Presence (count,); chain, second choices (-1: none) and levels, (count, length)."""
        d = self.drafters[i]
        shape = (len(modes), d.length)
        own = np.sqrt(1.0 - self.correlation) * rng.standard_normal(shape)
        margin = np.asarray(stats.norm.ppf(d.rates))[modes][:, None] - ease[:, : d.length] - own
        levels = np.searchsorted(CUTS, margin + d.noise * rng.standard_normal(shape))
        right = margin > 0.0
        lost = np.cumsum(~right, axis=1) - ~right > 0  # behind the first wrong token
        fooled = rng.random(shape) < self.decoy
        tokens = np.where(right & ~lost, RIGHT, np.where(fooled & ~lost, DECOY, 2 + 2 * i))
        saved = (rng.random(shape) < d.second) & ~right & ~lost
        beside = np.where(saved, RIGHT, 3 + 2 * i) if d.second else np.full(shape, -1)
        here = rng.random(len(modes)) < np.asarray(d.present)[modes]
        return here, tokens, beside, levels


def _tree(
    tokens: NDArray[np.int64], beside: NDArray[np.int64], levels: NDArray[np.int64]
) -> Proposal:
    n, seconds = len(tokens), np.flatnonzero(beside >= 0)
    return Proposal(
        [*range(-1, n - 1), *(seconds - 1).tolist()],
        [*tokens.tolist(), *beside[seconds].tolist()],
        [*levels.tolist(), *levels[seconds].tolist()],
    )


def _orthant(law: stats._multivariate.multivariate_normal_frozen, x: float, y: float) -> float:
    """P(X <= x, Y <= y), for infinite y too."""
    if np.isinf(y):
        return float(stats.norm.cdf(x)) if y > 0 else 0.0
    return float(law.cdf([x, y]))
