r"""MetaSD-SH: sequential halving over a budget, then the survivor for the rest.

.. math::

   \lceil \log_2 K \rceil \text{ phases; in each, every survivor is pulled }
   \Big\lfloor \frac{T_0}{|S| \lceil \log_2 K \rceil} \Big\rfloor
   \text{ times and the best } \lceil |S| / 2 \rceil \text{ are kept.}

Few switches, so little recomputation of a drafter's cache. Survivors are ranked by the mean of
all their rewards. Source: MetaSD (arXiv 2604.05417); Karnin, Koren and Somekh (2013). A decision
costs O(K), an update O(K), or O(K^2) where a phase ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled import schedules
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.state import State

__all__ = ["SequentialHalving", "halving"]


def halving(n_arms: int, budget: int) -> list[tuple[int, int]]:
    """Phases as (pulls of each survivor by the end of the phase, arms kept).

    >>> halving(5, 20)
    [(1, 3), (3, 2), (6, 1)]
    >>> halving(1, 20)
    []
    """
    n_phases = (n_arms - 1).bit_length()
    phases, alive, target = [], n_arms, 0
    for _ in range(n_phases):
        target += budget // (alive * n_phases)
        alive = (alive + 1) // 2
        phases.append((target, alive))
    return phases


@dataclass(frozen=True, eq=False)
class SequentialHalving(CompiledPolicy):
    """MetaSD-SH.

    Parameters
    ----------
    budget : int, optional
        Pulls T0 that may be spent on exploring, at least K ceil(log2 K) (`reset` refuses
        fewer, which would give no pull to an arm). The default, twice that (30 for 5
        drafters), leaves most of a query's hundred rounds to the survivor.

    Examples
    --------
    >>> policy = SequentialHalving(budget=20)
    >>> policy.reset(n_arms=5, seed=0)
    >>> arms = []
    >>> for _ in range(20):
    ...     arms.append(policy.select())
    ...     policy.update(arms[-1], [0.2, 0.5, 0.4, 0.1, 0.3][arms[-1]])
    >>> policy.pulls.tolist()
    [1, 9, 6, 1, 3]
    """

    name = "sh"
    compiled = schedules.SCHEDULE
    rows = schedules.N_ROWS
    restarts = True
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            checks.integer("budget", self.budget, 1)

    def theta(self) -> tuple[float, ...]:
        return (float(self.budget or 0),)

    def memory(self, n_arms: int) -> int:
        return schedules.schedule_size((n_arms - 1).bit_length())

    def prepare(self, s: State) -> None:
        n_arms = s.pulls.size
        least = n_arms * (n_arms - 1).bit_length()
        if self.budget is not None:
            checks.integer(f"budget (for {n_arms} arms)", self.budget, least)
        schedules.set_schedule(s, halving(n_arms, self.budget or 2 * least))
