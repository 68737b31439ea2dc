r"""KL-UCB: the largest mean that the arm's record does not rule out.

.. math::

   a_t = \arg\max_i \max\{ q : n_i \, d(\hat\mu_i, q) \le \ln t + c \ln\ln t \}

d is the Bernoulli divergence, ``kl(p, q) = p ln(p/q) + (1-p) ln((1-p)/(1-q))``, valid for every
reward in [0, 1], or the Gaussian (q - p)^2 / (2 sigma^2). t counts completed pulls, n_i those of
arm i (with pulls in flight); an arm never tried has an infinite index. Source: Garivier and
Cappe (2011). A decision costs O(K) (a few Newton steps for each arm), an update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled import CompiledPolicy
from metasd_bandits.kernel import kernel
from metasd_bandits.rules import index_rule, learn_mean
from metasd_bandits.state import trials

__all__ = ["KLUCB", "kl_bernoulli", "kl_bernoulli_upper"]

_FAMILIES = ("bernoulli", "gaussian")


@kernel
def kl_bernoulli(p, q):
    """Divergence of Bernoulli(p) from Bernoulli(q), exact at 0 and 1 (infinite where it is)."""
    d = 0.0
    if p > 0.0:
        if q <= 0.0:
            return math.inf
        d += p * math.log(p / q)
    if p < 1.0:
        if q >= 1.0:
            return math.inf
        d += (1.0 - p) * math.log((1.0 - p) / (1.0 - q))
    return max(d, 0.0)


@kernel
def kl_bernoulli_upper(p, budget):
    """The largest q in [p, 1] with kl(p, q) <= budget.

    Newton's method from above: kl(p, .) is convex and rising on [p, 1], so the steps only
    shrink towards the root. They start from the smaller of two bounds above it: Pinsker's
    p + sqrt(budget / 2), and what follows from -(1-p) ln(1-q) <= budget + entropy(p).
    """
    if p >= 1.0 or budget <= 0.0:
        return min(p, 1.0)
    if p <= 0.0:
        return -math.expm1(-budget)
    entropy = -p * math.log(p) - (1.0 - p) * math.log(1.0 - p)
    room = min(1.0 - p, math.sqrt(0.5 * budget))
    q = min(p + room, -math.expm1(-(budget + entropy) / (1.0 - p)))
    while q < 1.0:
        excess = -entropy - p * math.log(q) - (1.0 - p) * math.log1p(-q) - budget
        step = excess * q * (1.0 - q) / (q - p)
        if not (step > 1e-15 * q and q - step > p):
            break
        q -= step
    return q


@kernel
def index(s):
    t = max(s.clock[0], 1.0)
    budget = math.log(t)
    if t > math.e:
        budget += s.theta[1] * math.log(math.log(t))
    for i in range(s.score.size):
        n = trials(s, i)
        if n == 0.0:
            s.score[i] = np.inf
        elif s.theta[0] == 0.0:
            s.score[i] = kl_bernoulli_upper(s.mean[i], budget / n)
        else:
            s.score[i] = s.mean[i] + s.theta[2] * math.sqrt(2.0 * budget / n)


select, probabilities, propensity = index_rule(index)
update = learn_mean


@dataclass(frozen=True, eq=False)
class KLUCB(CompiledPolicy):
    """KL-UCB with Bernoulli or Gaussian divergence.

    Parameters
    ----------
    family : str, default "bernoulli"
        ``bernoulli`` or ``gaussian``. Bernoulli is never looser than Hoeffding's bound and is the
        right one for 0/1 rewards; Gaussian with a small sigma fits block divergence, which
        averages many positions.
    c : float, default 0.0
        Weight of ln ln t, at least 0. The proof wants 3, its authors recommend 0.
    sigma : float, default 0.5
        Standard deviation of the Gaussian family, positive; 1/2 covers every reward in [0, 1].

    Examples
    --------
    >>> policy = KLUCB()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [14, 139, 47]
    """

    name = "kl-ucb"
    family: str = "bernoulli"
    c: float = 0.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        checks.choice("family", self.family, _FAMILIES)
        checks.number("c", self.c, 0.0)
        checks.number("sigma", self.sigma, 0.0, open_low=True)

    def theta(self) -> tuple[float, ...]:
        return float(_FAMILIES.index(self.family)), self.c, self.sigma
