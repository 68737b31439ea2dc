r"""KL-UCB: the largest mean that the arm's record does not rule out.

.. math::

   a_t = \arg\max_i \max\{ q : n_i \, d(\hat\mu_i, q) \le \ln t + c \ln\ln t \}

d is the Bernoulli divergence, ``kl(p, q) = p ln(p/q) + (1-p) ln((1-p)/(1-q))``, valid for every
reward in [0, 1], or the Gaussian (q - p)^2 / (2 sigma^2). t counts completed pulls, n_i those of
arm i (with pulls in flight); an arm never tried has an infinite index. Source: Garivier and
Cappe (2011). A decision costs O(K) (with Newton steps for few of the arms), an update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule
from metasd_bandits.compiled.state import record, trials

__all__ = ["KLUCB", "kl_bernoulli", "kl_bernoulli_upper"]

ENTROPY = 0  # row: pulls times the entropy of the mean
SLACK = 1e-13  # beyond what rounding makes of an index
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
def entropy(p):
    """Of a Bernoulli(p), in nats."""
    return -p * math.log(p) - (1.0 - p) * math.log(1.0 - p) if 0.0 < p < 1.0 else 0.0


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
    own = entropy(p)
    room = min(1.0 - p, math.sqrt(0.5 * budget))
    q = min(p + room, -math.expm1(-(budget + own) / (1.0 - p)))
    while q < 1.0:
        excess = -own - p * math.log(q) - (1.0 - p) * math.log1p(-q) - budget
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
    if s.theta[0] == 0.0:
        bernoulli_index(s, budget)
    else:
        for i in range(s.score.size):
            n = trials(s, i)
            wide = s.theta[2] * math.sqrt(2.0 * budget / n) if n > 0.0 else math.inf
            s.score[i] = s.mean[i] + wide


@kernel
def bernoulli_index(s, budget):
    """The index of each arm that may be the largest; -inf where an earlier arm's is larger.

    An arm's index lies below q exactly if q is above its mean and n kl(mean, q) above the budget.
    For q just below the largest index so far, this test needs no logarithm of the arm's own (its
    entropy is kept), so that roots are searched only for the few arms that lead for a while.
    """
    leader, q, log_q, log_rest = -1, -1.0, 0.0, 0.0
    for i in range(s.score.size):
        n = trials(s, i)
        if n == 0.0:
            s.score[i] = math.inf
        elif leader >= 0 and s.mean[i] == s.mean[leader] and n == trials(s, leader):
            s.score[i] = s.score[leader]
        elif s.mean[i] < q and behind(s, i, log_q, log_rest, budget):
            s.score[i] = -math.inf
        else:
            s.score[i] = kl_bernoulli_upper(s.mean[i], budget / n)
        if s.available[i] != 0.0 and (leader < 0 or s.score[i] > s.score[leader]):
            leader, q = i, min(s.score[i], 1.0) - SLACK
            if q > 0.0:
                log_q, log_rest = math.log(q), math.log1p(-q)


@kernel
def behind(s, i, log_q, log_rest, budget):
    """Whether n kl(mean, q) exceeds the budget for arm i, beyond doubt by rounding."""
    n, pulls, total = trials(s, i), s.pulls[i], s.total[i]
    divergence = -s.rows[ENTROPY, i] - total * log_q - (pulls - total) * log_rest  # of all pulls
    return divergence * n > (budget + SLACK * (1.0 + n)) * pulls


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward)
    s.rows[ENTROPY, arm] = s.pulls[arm] * entropy(s.mean[arm])


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
    compiled = index_rule(index, update)
    rows = 1
    family: str = "bernoulli"
    c: float = 0.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        checks.choice("family", self.family, _FAMILIES)
        checks.number("c", self.c, 0.0)
        checks.number("sigma", self.sigma, 0.0, open_low=True)

    def theta(self) -> tuple[float, ...]:
        return float(_FAMILIES.index(self.family)), self.c, self.sigma
