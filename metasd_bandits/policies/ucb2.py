r"""UCB2: UCB in phases of growing length, so that arms are seldom switched.

.. math::

   a = \arg\max_i \; \hat\mu_i + \sqrt{\frac{(1 + \alpha) \ln(e t / \tau(r_i))}{2 \tau(r_i)}},
   \qquad \tau(r) = \lceil (1 + \alpha)^r \rceil

The arm found is played tau(r_a + 1) - tau(r_a) times, then r_a grows by one (by more where
rounding leaves a phase empty). Each arm is tried once first; t counts completed pulls. A mask
that hides the arm ends its phase. Switching a drafter costs recomputing its cache, which is why
few switches are worth a wider bonus. Source: Auer et al. (2002), Figure 2. A decision costs O(K),
an update O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean
from metasd_bandits.compiled.state import pick_max, trials

__all__ = ["UCB2"]

PHASES = 0  # row: r_i
ARM, LEFT = 0, 1  # memory: the arm of the phase, and how often it is still to be played


@kernel
def tau(s, r):
    return math.ceil((1.0 + s.theta[0]) ** r)


@kernel
def index(s):
    current = int(s.memory[ARM])
    if s.memory[LEFT] > 0.0 and s.available[current] != 0.0:
        s.score[:] = 0.0
        s.score[current] = 1.0
        return
    t = max(s.clock[0], 1.0)
    for i in range(s.score.size):
        length = tau(s, s.rows[PHASES, i])
        wide = (1.0 + s.theta[0]) * max(1.0 + math.log(t / length), 0.0) / (2.0 * length)
        s.score[i] = np.inf if trials(s, i) == 0.0 else s.mean[i] + math.sqrt(wide)


@kernel
def select(s, stream):
    index(s)
    arm = pick_max(s, stream)
    if s.memory[LEFT] > 0.0 and arm == s.memory[ARM]:
        s.memory[LEFT] -= 1.0
    else:
        start_phase(s, arm)
    return arm


@kernel
def start_phase(s, arm):
    """Enter the arm's next phase that is not empty; a first trial is no phase."""
    s.memory[ARM], s.memory[LEFT] = arm, 0.0
    if trials(s, arm) <= 1.0:
        return
    length = 0.0
    while length == 0.0:
        r = s.rows[PHASES, arm]
        length = tau(s, r + 1.0) - tau(s, r)
        s.rows[PHASES, arm] = r + 1.0
    s.memory[LEFT] = length - 1.0


@dataclass(frozen=True, eq=False)
class UCB2(CompiledPolicy):
    """UCB2.

    Parameters
    ----------
    alpha : float, default 0.5
        Growth of the phases, in (0, 1). Small values come near UCB's constant but switch more;
        0.5 plays an arm 1, 1, 2, 3, 4, 6, 9, ... times, a dozen phases in a query's hundred
        rounds.

    Examples
    --------
    >>> policy = UCB2()
    >>> policy.reset(n_arms=3, seed=0)
    >>> arms = []
    >>> for _ in range(200):
    ...     arms.append(policy.select())
    ...     policy.update(arms[-1], [0.2, 0.5, 0.4][arms[-1]])
    >>> sum(a != b for a, b in zip(arms, arms[1:]))  # switches
    30
    """

    name = "ucb2"
    compiled = index_rule(index, learn_mean)._replace(select=select)
    rows = 1
    restarts = True
    alpha: float = 0.5

    def __post_init__(self) -> None:
        checks.number("alpha", self.alpha, 0.0, 1.0, open_low=True, open_high=True)

    def memory(self, n_arms: int) -> int:
        return 2
