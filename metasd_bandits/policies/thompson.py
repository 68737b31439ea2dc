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
rows that select at the same time spread by their draws. Propensities are exact to about 1e-13,
by quadrature (`metasd_bandits.best_arm`), at O(K^2) cost; a plain ``select`` does not pay it.
Source: Thompson (1933); Agrawal and Goyal (2013). A decision costs O(K), an update O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.best_arm import BETA, best_arm_probabilities
from metasd_bandits.compiled import CompiledPolicy
from metasd_bandits.draws import beta_odds, gamma_spread, normal
from metasd_bandits.kernel import kernel
from metasd_bandits.state import State, pick_max, record

__all__ = ["Thompson"]

ACCEPTED, REJECTED, FIRST, SECOND, SPREAD_A, SPREAD_B = range(6)  # rows
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
    for i in range(s.score.size):
        if s.available[i] != 0.0:
            first, second = posterior(s, i)
            if s.theta[0] == BETA:
                spreads = s.rows[SPREAD_A, i], s.rows[SPREAD_B, i]
                s.score[i] = beta_odds(stream, first, second, *spreads)
            else:
                s.score[i] = first + second * normal(stream)
    return pick_max(s, stream)


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
    s.rows[SPREAD_A, arm] = gamma_spread(s.theta[1] + s.rows[ACCEPTED, arm])
    s.rows[SPREAD_B, arm] = gamma_spread(s.theta[2] + s.rows[REJECTED, arm])
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
    [14, 138, 48]
    """

    name = "thompson"
    rows = 6
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
        spread = getattr(gamma_spread, "py_func", gamma_spread)  # Python's, for whole rows
        s.rows[SPREAD_A] = spread(self.a + s.rows[ACCEPTED])
        s.rows[SPREAD_B] = spread(self.b + s.rows[REJECTED])

    def carry_memory(self, old: State, new: State, arms: Sequence[int | None], keep: float) -> None:
        self.prepare(new)  # with less evidence the draws spread wider
