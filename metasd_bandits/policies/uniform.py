r"""Rand: every available arm with the same probability, whatever was learned.

.. math:: p_t(i) = 1 / K

The paper's baseline "Rand" and the logging policy that offline evaluation likes best.
A decision costs O(K), an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import index_rule, learn_mean

__all__ = ["Uniform"]


@kernel
def index(s):
    s.score[:] = 0.0


@dataclass(frozen=True, eq=False)
class Uniform(CompiledPolicy):
    """Uniformly random arms (the paper's "Rand").

    Examples
    --------
    >>> policy = Uniform()
    >>> policy.reset(n_arms=4, seed=0)
    >>> policy.probabilities().tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> policy.probabilities(available=[True, False, True, False]).tolist()
    [0.5, 0.0, 0.5, 0.0]
    """

    name = "uniform"
    compiled = index_rule(index, learn_mean)
