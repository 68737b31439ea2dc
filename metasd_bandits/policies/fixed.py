r"""One arm, always: a single drafter, or the oracle when the arm is the best one.

.. math:: a_t = i

Where the arm is masked for a round, the available arms share the choice uniformly.
A decision costs O(K), an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean

__all__ = ["Fixed"]


@kernel
def index(s):
    s.score[:] = 0.0
    s.score[int(s.theta[0])] = 1.0


@dataclass(frozen=True, eq=False)
class Fixed(CompiledPolicy):
    """Always the same arm.

    Parameters
    ----------
    arm : int, default 0
        The arm's place, in [0, K).

    Examples
    --------
    >>> policy = Fixed(arm=2)
    >>> policy.reset(n_arms=3, seed=0)
    >>> [policy.select() for _ in range(3)]
    [2, 2, 2]
    """

    name = "fixed"
    compiled = index_rule(index, learn_mean)
    symmetric = False
    arm: int = 0

    def __post_init__(self) -> None:
        checks.integer("arm", self.arm, 0)

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        checks.integer("arm", self.arm, 0, n_arms - 1)
        super().reset(n_arms, seed)
