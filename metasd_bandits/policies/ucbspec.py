r"""UCBSpec: BanditSpec's anytime confidence radius.

.. math::

   a_t = \arg\max_i \; \hat\mu_i + \frac12 \sqrt{\frac{1 + n_i}{n_i^2}
         \Big(1 + 2 \ln \frac{K t^2 \sqrt{1 + n_i}}{\delta}\Big)}

BanditSpec (arXiv 2505.15141) states it for the tokens of a round, Y in [1, L + 1], with L/2 in
front of the root; with the reward r = (Y - 1) / L in [0, 1] the L cancels. t is the round being
decided, n_i the pulls of arm i (with those in flight); each arm is tried once first. The radius
counts an arm's own pulls, not all. A decision costs O(K), an update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean
from metasd_bandits.compiled.state import trials

__all__ = ["UCBSpec"]


@kernel
def index(s):
    K, t = s.score.size, s.clock[1] + 1.0
    for i in range(K):
        n = trials(s, i)
        if n == 0.0:
            s.score[i] = np.inf
        else:
            level = 1.0 + 2.0 * math.log(K * t * t * math.sqrt(1.0 + n) / s.theta[0])
            s.score[i] = s.mean[i] + 0.5 * math.sqrt((1.0 + n) / (n * n) * level)


@dataclass(frozen=True, eq=False)
class UCBSpec(CompiledPolicy):
    """BanditSpec's UCBSpec.

    Parameters
    ----------
    delta : float, default 0.5
        Confidence parameter, in (0, 1]; 1/2 is the value of its regret bound.

    Examples
    --------
    >>> policy = UCBSpec()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [25, 115, 60]
    """

    name = "ucbspec"
    compiled = index_rule(index, learn_mean)
    delta: float = 0.5

    def __post_init__(self) -> None:
        checks.number("delta", self.delta, 0.0, 1.0, open_low=True)
