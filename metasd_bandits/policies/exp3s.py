r"""EXP3.S: EXP3 whose weights leak to all arms, so that a buried arm can come back.

.. math::

   p_t(i) = (1 - \gamma) \frac{w_i}{\sum_j w_j} + \frac{\gamma}{K}, \qquad
   w_i \leftarrow w_i \exp\!\Big(\frac{\gamma \, \hat r_t(i)}{K}\Big)
         + \frac{e \alpha}{K} \sum_j w_j

with the importance-weighted estimate :math:`\hat r` of EXP3. Source: Auer, Cesa-Bianchi, Freund
and Schapire (2002), section 8; it competes with every sequence of arms that switches seldom. The
row holds log-weights, the largest at 0. A decision costs O(K), an update O(K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import importance, mix, sampling_rule, softmax
from metasd_bandits.compiled.state import record

__all__ = ["EXP3S"]


@kernel
def weigh(s):
    softmax(s, 1.0)
    mix(s, s.theta[0])


@kernel
def log_add(x, y):
    """ln(e^x + e^y) without overflow."""
    return max(x, y) + math.log1p(math.exp(-abs(x - y)))


@kernel
def update(s, arm, reward, cost, propensity):
    K = s.score.size
    total = 0.0
    for i in range(K):
        total += math.exp(s.rows[0, i])
    leak = 1.0 + math.log(s.theta[1] / K * total)
    s.rows[0, arm] += s.theta[0] / K * reward / importance(s, arm, propensity)
    top = -math.inf
    for i in range(K):
        s.rows[0, i] = log_add(s.rows[0, i], leak)
        top = max(top, s.rows[0, i])
    for i in range(K):
        s.rows[0, i] -= top
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class EXP3S(CompiledPolicy):
    """EXP3.S.

    Parameters
    ----------
    gamma : float, default 0.1
        Share of uniform exploration, in (0, 1], as in ``exp3``.
    alpha : float, default 0.01
        Leak, in (0, 1]. Its authors choose 1/T; 0.01 expects a change about once in a query's
        hundred rounds.

    Examples
    --------
    >>> policy = EXP3S(gamma=0.2)
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [42, 87, 71]
    """

    name = "exp3s"
    compiled = sampling_rule(weigh, update)
    rows = 1
    optimistic = (0,)
    gamma: float = 0.1
    alpha: float = 0.01

    def __post_init__(self) -> None:
        checks.number("gamma", self.gamma, 0.0, 1.0, open_low=True)
        checks.number("alpha", self.alpha, 0.0, 1.0, open_low=True)
