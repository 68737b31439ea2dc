r"""SW-UCB: MetaSD-UCB on the latest completed pulls alone.

.. math::

   a_t = \arg\max_i \; \bar\mu_i + \beta \sqrt{2 \ln \min(t, \tau) / N_i}

N_i and the mean count the last tau completed pulls. An arm that has left the window is untried
again. Source: Garivier and Moulines (2011), whose xi is beta^2 / 2 here; a window no shorter than
the run is ``ucb``. A decision costs O(K), an update O(1) on average: the sums are
made anew from the window each time it has turned over, so that rounding cannot pile up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import COUNT, TOTAL, index_rule, recent_index
from metasd_bandits.compiled.state import State, record

__all__ = ["SlidingWindowUCB"]

HELD, NEXT, FIRST = 0, 1, 2  # memory: pulls held, the next place, then (arm, reward) pairs


@kernel
def index(s):
    recent_index(s, s.theta[1], s.memory[HELD])


@kernel
def update(s, arm, reward, cost, propensity):
    record(s, arm, reward)
    push(s, arm, reward)


@kernel
def push(s, arm, reward):
    """Put a pull into the window; the oldest leaves a full one."""
    window = int(s.theta[0])
    place = FIRST + 2 * int(s.memory[NEXT])
    if s.memory[HELD] == window:
        oldest = int(s.memory[place])
        s.rows[COUNT, oldest] -= 1.0
        s.rows[TOTAL, oldest] -= s.memory[place + 1]
        if s.rows[COUNT, oldest] == 0.0:
            s.rows[TOTAL, oldest] = 0.0
    else:
        s.memory[HELD] += 1.0
    s.memory[place], s.memory[place + 1] = arm, reward
    s.rows[COUNT, arm] += 1.0
    s.rows[TOTAL, arm] += reward
    s.memory[NEXT] = (s.memory[NEXT] + 1.0) % window
    if s.memory[NEXT] == 0.0:
        resum(s, window)


@kernel
def resum(s, window):
    for i in range(s.score.size):
        s.rows[TOTAL, i] = 0.0
    for k in range(window):
        s.rows[TOTAL, int(s.memory[FIRST + 2 * k])] += s.memory[FIRST + 2 * k + 1]


@dataclass(frozen=True, eq=False)
class SlidingWindowUCB(CompiledPolicy):
    """Sliding-window UCB.

    Parameters
    ----------
    window : int, default 100
        Completed pulls remembered, at least K (a shorter one could never hold every arm, and is
        refused at `reset`). 100 is about the rounds of one query.
    beta : float, default 1.0
        Width of the confidence bonus, at least 0, as in ``ucb``.

    Examples
    --------
    >>> policy = SlidingWindowUCB(window=20, beta=0.3)
    >>> policy.reset(n_arms=2, seed=0)
    >>> for t in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.8][arm] if t < 150 else [0.8, 0.2][arm])
    >>> policy.pulls.tolist()
    [54, 146]
    """

    name = "sw-ucb"
    compiled = index_rule(index, update)
    rows = 2
    window: int = 100
    beta: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("window", self.window, 1)
        checks.number("beta", self.beta, 0.0)

    def memory(self, n_arms: int) -> int:
        checks.integer("window", self.window, n_arms)
        return FIRST + 2 * self.window

    def carry_memory(self, old: State, new: State, arms: Sequence[int | None], keep: float) -> None:
        """The latest pulls, of arms still here: the share `keep` of those held."""
        new.rows[:] = 0.0
        held, window = int(old.memory[HELD]), self.window
        for age in range(round(keep * held), 0, -1):
            place = FIRST + 2 * int((old.memory[NEXT] - age) % window)
            arm, reward = int(old.memory[place]), old.memory[place + 1]
            if arm in arms:
                push(new, arms.index(arm), reward)
