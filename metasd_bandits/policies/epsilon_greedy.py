r"""Epsilon-greedy: the best mean, or with probability epsilon any arm.

.. math::

   p_t(i) = (1 - \epsilon) \frac{[\, i \in \arg\max_j \hat\mu_j \,]}{|\arg\max_j \hat\mu_j|}
            + \frac{\epsilon}{K}

Arms never tried come first. Source: Sutton and Barto (2018), section 2.2. A decision costs O(K),
an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import explore, learn_mean, sampling_rule
from metasd_bandits.compiled.state import trials

__all__ = ["EpsilonGreedy"]


@kernel
def weigh(s):
    for i in range(s.score.size):
        s.score[i] = np.inf if trials(s, i) == 0.0 else s.mean[i]
    explore(s, s.theta[0])


@dataclass(frozen=True, eq=False)
class EpsilonGreedy(CompiledPolicy):
    """Epsilon-greedy.

    Parameters
    ----------
    epsilon : float, default 0.1
        Share of uniform exploration, in [0, 1]. 0.1 is the textbook's value; its regret is linear
        in the horizon, which a query's hundred rounds forgive.

    Examples
    --------
    >>> policy = EpsilonGreedy()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [7, 187, 6]
    """

    name = "epsilon-greedy"
    compiled = sampling_rule(weigh, learn_mean)
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon, 0.0, 1.0)
