r"""D-UCB: MetaSD-UCB on records in which every pull fades with age.

.. math::

   a_t = \arg\max_i \; \bar\mu_i + \beta \sqrt{2 \ln N / N_i}, \qquad
   N_i = \sum_{s : a_s = i} \gamma^{t - s}, \quad N = \sum_i N_i

and the mean weighted alike. Every arm fades with every completed pull, not the pulled one alone.
Source: Garivier and Moulines (2011), whose xi is beta^2 / 2 here; as gamma goes to 1 it becomes
``ucb``. A decision costs O(K), an update O(K).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import COUNT, TOTAL, index_rule, recent_index, recent_pulls
from metasd_bandits.compiled.state import record

__all__ = ["DiscountedUCB"]


@kernel
def index(s):
    recent_index(s, s.theta[1], recent_pulls(s))


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward)
    for j in range(2):
        for i in range(s.score.size):
            s.rows[j, i] *= s.theta[0]
    s.rows[COUNT, arm] += 1.0
    s.rows[TOTAL, arm] += reward


@dataclass(frozen=True, eq=False)
class DiscountedUCB(CompiledPolicy):
    """Discounted UCB.

    Parameters
    ----------
    gamma : float, default 0.98
        Discount per completed pull, in (0, 1]; about 1 / (1 - gamma) pulls are remembered. 0.98
        remembers 50, about half of a query's rounds.
    beta : float, default 1.0
        Width of the confidence bonus, at least 0, as in ``ucb``.

    Examples
    --------
    >>> policy = DiscountedUCB(gamma=0.9, beta=0.3)
    >>> policy.reset(n_arms=2, seed=0)
    >>> for t in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.8][arm] if t < 150 else [0.8, 0.2][arm])
    >>> policy.pulls.tolist()
    [58, 142]
    """

    name = "d-ucb"
    compiled = index_rule(index, update)
    rows = 2
    gamma: float = 0.98
    beta: float = 1.0

    def __post_init__(self) -> None:
        checks.number("gamma", self.gamma, 0.0, 1.0, open_low=True)
        checks.number("beta", self.beta, 0.0)
