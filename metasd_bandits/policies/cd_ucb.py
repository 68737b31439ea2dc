r"""CD-UCB: UCB whose arms start over when their rewards have changed.

.. math::

   a_t = \arg\max_i \; \bar\mu_i + \beta \sqrt{2 \ln N / N_i}
   \quad \text{with probability } 1 - \epsilon, \text{ else any arm}

N_i and the mean count arm i's pulls since its last alarm, N is their sum. The alarm is a two-sided
CUSUM: the first M pulls set the level u, and then

.. math::

   g^\pm \leftarrow \max\big(0, \; g^\pm \pm (r - u) - d\big), \qquad
   \text{alarm when } \max(g^+, g^-) \ge h

The share epsilon of uniform choice lets a change be noticed in an arm no longer played. Arms
never tried come first. Source: Liu, Lee and Shroff (2018), CUSUM-UCB. A decision costs O(K), an
update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import (
    COUNT,
    TOTAL,
    explore,
    recent_index,
    recent_pulls,
    sampling_rule,
)
from metasd_bandits.compiled.state import record

__all__ = ["ChangeDetectionUCB"]

LEVEL, UP, DOWN = 2, 3, 4  # rows, beside COUNT and TOTAL: sum of the first M rewards, g+, g-


@kernel
def weigh(s):
    recent_index(s, s.theta[0], recent_pulls(s))
    explore(s, s.theta[1])


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward)
    s.rows[COUNT, arm] += 1.0
    s.rows[TOTAL, arm] += reward
    warmup, drift, threshold = s.theta[2], s.theta[3], s.theta[4]
    if s.rows[COUNT, arm] <= warmup:
        s.rows[LEVEL, arm] += reward
        return
    change = reward - s.rows[LEVEL, arm] / warmup
    s.rows[UP, arm] = max(0.0, s.rows[UP, arm] + change - drift)
    s.rows[DOWN, arm] = max(0.0, s.rows[DOWN, arm] - change - drift)
    if max(s.rows[UP, arm], s.rows[DOWN, arm]) >= threshold:
        for j in range(s.rows.shape[0]):
            s.rows[j, arm] = 0.0


@dataclass(frozen=True, eq=False)
class ChangeDetectionUCB(CompiledPolicy):
    r"""UCB with CUSUM restarts.

    Parameters
    ----------
    beta : float, default 1.0
        Width of the confidence bonus, at least 0, as in ``ucb``.
    epsilon : float, default 0.05
        Share of uniform exploration, in [0, 1]: each of 5 arms is looked at every 100 rounds.
    warmup : int, default 10
        Pulls M that set the level.
    drift : float, default 0.1
        Changes d of the mean that are let pass, at least 0.
    threshold : float, default 2.0
        h, positive. An undisturbed arm of standard deviation :math:`\sigma` raises an alarm about
        once in :math:`\exp(2 d h / \sigma^2)` pulls or more (e^10 at :math:`\sigma = .2`, as block
        divergence has it), and a shift by x is noticed after about h / (x - d) pulls. For 0/1
        rewards take a larger one.

    Examples
    --------
    >>> policy = ChangeDetectionUCB(beta=0.3)
    >>> policy.reset(n_arms=2, seed=0)
    >>> for t in range(300):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.8][arm] if t < 150 else [0.8, 0.2][arm])
    >>> policy.pulls.tolist()
    [144, 156]
    """

    name = "cd-ucb"
    compiled = sampling_rule(weigh, update)
    rows = 5
    beta: float = 1.0
    epsilon: float = 0.05
    warmup: int = 10
    drift: float = 0.1
    threshold: float = 2.0

    def __post_init__(self) -> None:
        checks.number("beta", self.beta, 0.0)
        checks.number("epsilon", self.epsilon, 0.0, 1.0)
        checks.integer("warmup", self.warmup, 1)
        checks.number("drift", self.drift, 0.0)
        checks.number("threshold", self.threshold, 0.0, open_low=True)
