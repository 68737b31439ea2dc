r"""MetaSD-EXP3: exponential weights on importance-weighted rewards, mixed with uniform choice.

.. math::

   p_t(i) = (1 - \gamma) \frac{w_i}{\sum_j w_j} + \frac{\gamma}{K}, \qquad
   w_{a_t} \leftarrow w_{a_t} \exp\!\Big(\frac{\gamma}{K} \frac{r_t}{p_t(a_t)}\Big)

Source: MetaSD (arXiv 2604.05417), Algorithm 7; Auer, Cesa-Bianchi, Freund and Schapire (2002),
Exp3. One row holds log-weights, so that no reward sequence overflows; another the weights over a
common scale, of which a pull changes one, so that a decision takes no exponential. A reward that
comes back late is weighted by the propensity at its decision. A decision costs O(K), an update
O(1) but for a change of scale once in many pulls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import importance, mix, sampling_rule, softmax
from metasd_bandits.compiled.state import State, record

__all__ = ["EXP3"]


LOG, WEIGHT = 0, 1  # rows
SCALE = 0  # memory: the log-weight whose weight is 1
_LARGEST = 100.0  # over the scale, before it changes
_LEAST = 1e-280  # a sum that is still exact to the last digit


@kernel
def weigh(s):
    total, count = 0.0, 0.0
    for i in range(s.score.size):
        if s.available[i] != 0.0:
            total += s.rows[WEIGHT, i]
            count += 1.0
    if total < _LEAST:  # the heavy arms are masked
        softmax(s, 1.0)
        mix(s, s.theta[0])
        return
    share, least = (1.0 - s.theta[0]) / total, s.theta[0] / count
    for i in range(s.score.size):
        s.score[i] = share * s.rows[WEIGHT, i] + least if s.available[i] != 0.0 else 0.0


@kernel
def rescale(s):
    """Weights relative to the largest. O(K)."""
    scale = s.rows[LOG, 0]
    for i in range(s.score.size):
        scale = max(scale, s.rows[LOG, i])
    s.memory[SCALE] = scale
    for i in range(s.score.size):
        s.rows[WEIGHT, i] = math.exp(s.rows[LOG, i] - scale)


@kernel
def update(s, arm, reward, cost, propensity):
    s.rows[LOG, arm] += s.theta[0] / s.score.size * reward / importance(s, arm, propensity)
    above = s.rows[LOG, arm] - s.memory[SCALE]
    if above < _LARGEST:
        s.rows[WEIGHT, arm] = math.exp(above)
    else:
        rescale(s)
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class EXP3(CompiledPolicy):
    """MetaSD-EXP3 (the paper's Algorithm 7).

    Parameters
    ----------
    gamma : float, default 0.4
        Share of uniform exploration, in (0, 1], and the learning rate. The paper leaves it open;
        Auer et al. choose min(1, sqrt(K ln K / ((e - 1) T))), which is 0.3 at K = 5 and the
        fifty rounds of a query, 0.1 at 470. Over the paper's tasks and outputs of 64 to 1,024
        tokens, 0.4 loses least time to the best drafter (``metasd-sim ablate gamma``).

    Examples
    --------
    >>> policy = EXP3(gamma=0.2)
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [28, 115, 57]
    """

    name = "exp3"
    compiled = sampling_rule(weigh, update)
    rows = 2
    optimistic = (LOG,)
    gamma: float = 0.4

    def __post_init__(self) -> None:
        checks.number("gamma", self.gamma, 0.0, 1.0, open_low=True)

    def memory(self, n_arms: int) -> int:
        return 1

    def prepare(self, s: State) -> None:
        s.memory[SCALE] = s.rows[LOG].max()
        s.rows[WEIGHT] = np.exp(s.rows[LOG] - s.memory[SCALE])

    def carry_memory(self, old: State, new: State, arms: Sequence[int | None], keep: float) -> None:
        self.prepare(new)
