r"""Round-robin: every arm in turn.

.. math:: a_t = \arg\min_i \; \text{(the decision at which } i \text{ was last chosen)}

The first turn goes in a random order, which later turns repeat; an arm that was masked is next
when it comes back. A decision costs O(K), an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean
from metasd_bandits.compiled.state import pick_max

__all__ = ["RoundRobin"]

LAST = 0  # row: the number of the decision that chose the arm last, 0 before the first


@kernel
def index(s):
    for i in range(s.score.size):
        s.score[i] = -s.rows[LAST, i]


@kernel
def select(s, stream):
    index(s)
    arm = pick_max(s, stream)
    s.rows[LAST, arm] = s.clock[1]
    return arm


@dataclass(frozen=True, eq=False)
class RoundRobin(CompiledPolicy):
    """Every arm in turn.

    Examples
    --------
    >>> policy = RoundRobin()
    >>> policy.reset(n_arms=3, seed=0)
    >>> [policy.select() for _ in range(9)]
    [0, 1, 2, 0, 1, 2, 0, 1, 2]
    """

    name = "round-robin"
    compiled = index_rule(index, learn_mean)._replace(select=select)
    rows = 1
