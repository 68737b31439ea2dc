r"""Thompson sampling: draw from each arm's posterior, play the largest draw.

.. math::

   \theta_i \sim \pi_i, \qquad a_t = \arg\max_i \theta_i

- ``model="beta"``, for block efficiency: :math:`\pi_i = \mathrm{Beta}(a + A_i, b + R_i)`, where a
  reward adds the tokens accepted, N r, to A_i and the tokens rejected, min(1, N (1 - r)), to R_i.
  That is the exact posterior of an acceptance rate under a geometric truncated at N; N = 1 is
  the usual Beta-Bernoulli rule (with fractional rewards splitting one trial).
- ``model="gaussian"``, for block divergence:
  :math:`\pi_i = \mathcal{N}(m_i, \sigma^2 / (1 + n_i))` with
  :math:`m_i = (1/2 + \sum r) / (1 + n_i)`, that is one pseudo-reward of 1/2.

Untried arms are not forced: the prior speaks for them. Rewards not yet back are not anticipated;
rows that select at the same time spread by their draws. Of Beta posteriors only the draw of the arm
with the largest mode is always made; the others' are made where they may exceed the largest so far
(`metasd_bandits.compiled.beta_tail`), which changes no probability. Propensities are exact to about
1e-13, by quadrature (`metasd_bandits.compiled.best_arm`), at O(K^2) cost; a plain ``select`` does
not pay it.
Source: Thompson (1933); Agrawal and Goyal (2013). A decision costs O(K), an update O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from numba import uint64

from metasd_bandits import checks
from metasd_bandits.compiled.best_arm import BETA, best_arm_probabilities
from metasd_bandits.compiled.beta_tail import (
    mode_of,
    odds_beyond,
    peak_bound,
    surely_below,
    tail_weight,
)
from metasd_bandits.compiled.draws import beta, gamma_spreads, normal
from metasd_bandits.compiled.kernel import Kernels, kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.state import State, book, pick_max, record
from metasd_bandits.compiled.stream import uniform, word

__all__ = ["Thompson"]

ACCEPTED, REJECTED, FIRST, SECOND, SPREAD_A, SPREAD_B, WEIGHT, PEAK, MODE = range(9)
LEADING = 2.0**-16  # of a uniform number: four arms share a word
_MODELS = ("beta", "gaussian")  # in the order of best_arm's BETA, GAUSSIAN


@kernel
def posterior(s, i):
    """Parameters of arm i's posterior: (a, b) of the Beta, or the Gaussian's mean and deviation."""
    if s.theta[0] == BETA:
        return s.theta[1] + s.rows[ACCEPTED, i], s.theta[2] + s.rows[REJECTED, i]
    n = 1.0 + s.pulls[i]
    return (0.5 + s.total[i]) / n, s.theta[4] / math.sqrt(n)


@kernel
def select(s, stream):
    if s.theta[0] == BETA:
        return book(s, largest_draw(s, stream))
    for i in range(s.score.size):
        if s.available[i] != 0.0:
            mean, deviation = posterior(s, i)
            s.score[i] = mean + deviation * normal(stream)
    return pick_max(s, stream)


@kernel
def largest_draw(s, stream):
    """The available arm whose Beta draw is the largest; the likeliest to be is drawn first."""
    first = favourite(s)
    x, rest = draw(s, stream, first)
    bits, left = uint64(0), 0
    for i in range(s.score.size):
        if s.available[i] == 0.0 or i == first:
            continue
        if left == 0:
            bits, left = word(stream), 4
        u = (bits & uint64(0xFFFF)) * LEADING  # rounded down, which says "beaten" no more often
        bits, left = bits >> uint64(16), left - 1
        if not beaten(s, i, u, x, rest):
            u += LEADING * uniform(stream)
            if not beaten(s, i, u, x, rest):
                return rivals(s, stream, first, x, rest, i, u)
    return first


@kernel
def rivals(s, stream, first, x, rest, i, u):
    """The same from arm i on, whose uniform u leaves open whether it is beaten.

    Draws are compared by their odds, x / (1 - x).
    """
    best, level = first, x / rest
    while True:
        if not beaten(s, i, u, x, rest):
            if beaten(s, i, 1.0, x, rest):
                a, b = posterior(s, i)
                odds = odds_beyond(stream, u, x, rest, a, b)
            else:
                x_i, rest_i = draw(s, stream, i)
                odds = x_i / rest_i
            if odds > level:
                best, level = i, odds
                rest = 1.0 / (1.0 + odds)
                x = odds * rest
        i += 1
        while i < s.score.size and (s.available[i] == 0.0 or i == first):
            i += 1
        if i >= s.score.size:
            return best
        u = uniform(stream)


@kernel
def draw(s, stream, i):
    """A draw x from arm i's posterior, and 1 - x."""
    a, b = posterior(s, i)
    return beta(stream, a, b, s.rows[SPREAD_A, i], s.rows[SPREAD_B, i])


@kernel
def beaten(s, i, u, x, rest):
    """Whether u tells that arm i's draw lies below x; for u = 1: whether any u may."""
    return surely_below(u, x, rest, s.rows[MODE, i], s.rows[WEIGHT, i], s.rows[PEAK, i])


@kernel
def favourite(s):
    """An available arm whose posterior's mode is the largest."""
    arm, best = -1, 0.0
    for i in range(s.score.size):
        if s.available[i] != 0.0 and (arm < 0 or s.rows[MODE, i] > best):
            arm, best = i, s.rows[MODE, i]
    return arm


@kernel
def probabilities(s):
    for i in range(s.score.size):
        first, second = posterior(s, i)
        s.rows[FIRST, i], s.rows[SECOND, i] = first, second
    best_arm_probabilities(s.theta[0], s.rows[FIRST], s.rows[SECOND], s.available, s.score)


@kernel
def propensity(s, arm):
    probabilities(s)
    return s.score[arm]


@kernel
def update(s, arm, reward, cost, propensity):
    s.rows[ACCEPTED, arm] += s.theta[3] * reward
    s.rows[REJECTED, arm] += min(1.0, s.theta[3] * (1.0 - reward))
    if s.theta[0] == BETA:
        a, b = posterior(s, arm)
        s.rows[SPREAD_A, arm], s.rows[SPREAD_B, arm] = gamma_spreads(a, b)
        s.rows[WEIGHT, arm], s.rows[PEAK, arm] = tail_weight(a, b), peak_bound(a, b)
        s.rows[MODE, arm] = mode_of(a, b)
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class Thompson(CompiledPolicy):
    """Thompson sampling with a Beta or a Gaussian posterior.

    Parameters
    ----------
    model : str, default "beta"
        ``beta`` for block efficiency or 0/1 rewards, ``gaussian`` for block divergence.
    a, b : float, default 1.0
        The Beta prior, each at least 0.1; 1, 1 is uniform.
    draft_length : int, default 1
        N, so that a reward r stands for N r accepted tokens. Give the block length with block
        efficiency; 1 takes the reward as one (fractional) success.
    sigma : float, default 0.5
        Standard deviation of one Gaussian reward, positive; 1/2 covers every reward in [0, 1].

    Examples
    --------
    >>> policy = Thompson()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [12, 141, 47]
    """

    name = "thompson"
    compiled = Kernels(select, probabilities, update, propensity)
    rows = 9
    model: str = "beta"
    a: float = 1.0
    b: float = 1.0
    draft_length: int = 1
    sigma: float = 0.5

    def __post_init__(self) -> None:
        checks.choice("model", self.model, _MODELS)
        checks.number("a", self.a, 0.1)
        checks.number("b", self.b, 0.1)
        checks.integer("draft_length", self.draft_length, 1)
        checks.number("sigma", self.sigma, 0.0, open_low=True)

    def theta(self) -> tuple[float, ...]:
        model = float(_MODELS.index(self.model))
        return model, self.a, self.b, float(self.draft_length), self.sigma

    def prepare(self, s: State) -> None:
        # Python's own functions, for whole rows.
        spreads, weight, peak, mode = (
            getattr(kernel, "py_func", kernel)
            for kernel in (gamma_spreads, tail_weight, peak_bound, mode_of)
        )
        a, b = self.a + s.rows[ACCEPTED], self.b + s.rows[REJECTED]
        s.rows[SPREAD_A], s.rows[SPREAD_B] = spreads(a, b)
        s.rows[WEIGHT], s.rows[PEAK] = weight(a, b), peak(a, b)
        s.rows[MODE] = mode(a, b)

    def carry_memory(self, old: State, new: State, arms: Sequence[int | None], keep: float) -> None:
        self.prepare(new)  # with less evidence the draws spread wider
