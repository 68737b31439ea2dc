r"""UCB-Tuned: the bonus follows the variance each arm has shown.

.. math::

   a_t = \arg\max_i \; \hat\mu_i + \sqrt{\frac{\ln t}{n_i}
         \min\Big(\tfrac14, \; \hat\sigma_i^2 + \sqrt{2 \ln t / n_i}\Big)}

t counts completed pulls, n_i those of arm i (with pulls in flight); an arm never tried has an
infinite index. 1/4 is the largest variance of a reward in [0, 1]. No hyperparameter. Source: Auer
et al. (2002), section 4, who give no bound for it but found it best. A decision costs O(K), an
update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_variance, variance
from metasd_bandits.compiled.state import trials

__all__ = ["UCBTuned"]


@kernel
def index(s):
    log_t = math.log(max(s.clock[0], 1.0))
    for i in range(s.score.size):
        n = trials(s, i)
        if n == 0.0:
            s.score[i] = np.inf
        else:
            spread = min(0.25, variance(s, i) + math.sqrt(2.0 * log_t / n))
            s.score[i] = s.mean[i] + math.sqrt(log_t / n * spread)


@dataclass(frozen=True, eq=False)
class UCBTuned(CompiledPolicy):
    """UCB-Tuned.

    Examples
    --------
    >>> policy = UCBTuned()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [9, 155, 36]
    """

    name = "ucb-tuned"
    compiled = index_rule(index, learn_variance)
    rows = 1
