r"""Ratio-UCB: the arm of the largest optimistic E[reward] / E[cost].

.. math::

   a_t = \arg\max_i \frac{\min(1, \; \hat\mu_i + b_i)}{\max(c_{\min}, \; \hat c_i - w b_i)},
   \qquad b_i = \beta \sqrt{2 \ln t / n_i}

By the renewal-reward theorem an arm played for ever earns E[reward] / E[cost] per unit of time, so
this, and not E[reward / cost] nor E[reward], is what maximises tokens per second where drafters
cost differently. Give it the reward ``tokens`` and the round's duration in plain target steps
as the cost. An arm never tried has an infinite index; t counts completed pulls, n_i those of arm
i (with pulls in flight).

Ours, after the budgeted bandits of Ding et al. (2013) and Xia et al. (2016). With costs inside an
interval of width w and mean at least c_min, and beta = 1, each bound fails with probability at
most t^-4, so that an arm behind the best ratio is pulled O(ln t) times (docs/policies.md). A
decision costs O(K), an update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule
from metasd_bandits.compiled.state import record, trials

__all__ = ["RatioUCB"]

COST = 0  # row: sum of costs


@kernel
def index(s):
    wide = s.theta[0] * math.sqrt(2.0 * math.log(max(s.clock[0], 1.0)))
    least, width = s.theta[1], s.theta[2]
    for i in range(s.score.size):
        n = trials(s, i)
        if n == 0.0:
            s.score[i] = np.inf
            continue
        bonus = wide / math.sqrt(n)
        cost = s.rows[COST, i] / s.pulls[i] if s.pulls[i] > 0.0 else least
        s.score[i] = min(1.0, s.mean[i] + bonus) / max(least, cost - width * bonus)


@kernel
def update(s, arm, reward, cost, propensity):
    s.rows[COST, arm] += cost
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class RatioUCB(CompiledPolicy):
    """UCB on the ratio of mean reward to mean cost.

    Parameters
    ----------
    beta : float, default 1.0
        Width of both confidence bonuses, at least 0, as in ``ucb``.
    cost_min : float, default 1.0
        The least mean cost there can be, positive. A round holds one target forward, so in
        units of plain target steps no round costs less than about 1.
    cost_width : float, default 1.0
        Width of the interval the costs lie in, at least 0: rounds cost 1 to 2 plain steps
        (the paper's tables imply about 1.15).

    Examples
    --------
    >>> policy = RatioUCB(beta=0.3)
    >>> policy.reset(n_arms=2, seed=0)
    >>> for _ in range(300):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.5, 0.6][arm], cost=[1.1, 1.9][arm])
    >>> policy.pulls.tolist()  # arm 1 earns more per round, arm 0 more per unit of time
    [286, 14]
    """

    name = "ratio-ucb"
    compiled = index_rule(index, update)
    rows = 1
    beta: float = 1.0
    cost_min: float = 1.0
    cost_width: float = 1.0

    def __post_init__(self) -> None:
        checks.number("beta", self.beta, 0.0)
        checks.number("cost_min", self.cost_min, 0.0, open_low=True)
        checks.number("cost_width", self.cost_width, 0.0)
