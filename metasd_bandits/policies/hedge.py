r"""Hedge: exponential weights on every arm's reward, where rounds carry them all.

.. math::

   p_t(i) \propto \exp(\eta_t \, G_i), \qquad \eta_t = c \sqrt{8 \ln K / t}, \qquad
   G_i \leftarrow G_i + r_t(i) - 1 \;\text{ for every arm}

Source: Freund and Schapire (1997); the rate that needs no horizon is Cesa-Bianchi and Lugosi
(2006), Theorem 2.3. HedgeSpec ("Not-a-Bandit", arXiv 2510.20064) scores all drafters on the
verified tokens in this way. A round that carries the pulled arm's reward alone moves that arm by
the importance-weighted (r - 1) / p: unbiased, but noisy; prefer ``exp3-ix`` there.
A decision costs O(K), an update O(K), or O(1) with one reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import learn_loss, sampling_rule, softmax
from metasd_bandits.compiled.state import record

__all__ = ["Hedge"]


@kernel
def weigh(s):
    softmax(s, s.theta[0] * math.sqrt(8.0 * math.log(s.score.size) / (s.clock[0] + 1.0)))


@kernel
def update_all(s, arm, rewards, cost, propensity):
    for i in range(rewards.size):
        s.rows[0, i] -= 1.0 - rewards[i]
    record(s, arm, rewards[arm])


@dataclass(frozen=True, eq=False)
class Hedge(CompiledPolicy):
    """Exponential weights under full information.

    Parameters
    ----------
    scale : float, default 1.0
        Factor c of the learning rate, positive; 1 is the rate of the theorem.

    Examples
    --------
    >>> policy = Hedge()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(50):
    ...     arm = policy.select()
    ...     rewards = [0.2, 0.5, 0.4]
    ...     policy.update(arm, rewards[arm], rewards=rewards)
    >>> policy.probabilities().round(3).tolist()
    [0.002, 0.887, 0.111]
    """

    name = "hedge"
    compiled = sampling_rule(weigh, learn_loss, update_all)
    rows = 1
    optimistic = (0,)
    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.number("scale", self.scale, 0.0, open_low=True)
