r"""ETC: explore every arm equally, then commit to the best.

.. math::

   a_t = \text{the least pulled arm while } n_i < m; \quad
   \arg\max_i \hat\mu_i(mK) \text{ ever after}

Source: Robbins (1952); Lattimore and Szepesvari (2020), chapter 6. A decision costs O(K), an
update O(K).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled import schedules
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.state import State

__all__ = ["ExploreThenCommit"]


@dataclass(frozen=True, eq=False)
class ExploreThenCommit(CompiledPolicy):
    """Explore then commit.

    Parameters
    ----------
    explore : int, default 5
        Pulls m of each arm before the commitment, at least 1. 5 tells apart drafters whose
        block divergence differs by .2 (its standard deviation is about .2 at N = 5), and
        costs a quarter of a query's hundred rounds with 5 drafters.

    Examples
    --------
    >>> policy = ExploreThenCommit(explore=3)
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(20):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [3, 14, 3]
    """

    name = "etc"
    compiled = schedules.SCHEDULE
    rows = schedules.N_ROWS
    restarts = True
    explore: int = 5

    def __post_init__(self) -> None:
        checks.integer("explore", self.explore, 1)

    def memory(self, n_arms: int) -> int:
        return schedules.schedule_size(1)

    def prepare(self, s: State) -> None:
        schedules.set_schedule(s, [(self.explore, 1)])
