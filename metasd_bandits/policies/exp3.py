r"""MetaSD-EXP3: exponential weights on importance-weighted rewards, mixed with uniform choice.

.. math::

   p_t(i) = (1 - \gamma) \frac{w_i}{\sum_j w_j} + \frac{\gamma}{K}, \qquad
   w_{a_t} \leftarrow w_{a_t} \exp\!\Big(\frac{\gamma}{K} \frac{r_t}{p_t(a_t)}\Big)

Source: MetaSD (arXiv 2604.05417), Algorithm 7; Auer, Cesa-Bianchi, Freund and Schapire (2002),
Exp3. The row holds log-weights, so that no reward sequence overflows. A reward that comes back
late is weighted by the propensity at its decision. A decision costs O(K), an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled import CompiledPolicy
from metasd_bandits.kernel import kernel
from metasd_bandits.rules import importance, mix, sampling_rule, softmax
from metasd_bandits.state import record

__all__ = ["EXP3"]


@kernel
def weigh(s):
    softmax(s, 1.0)
    mix(s, s.theta[0])


select, probabilities, propensity = sampling_rule(weigh)


@kernel
def update(s, arm, reward, cost, propensity):
    s.rows[0, arm] += s.theta[0] / s.score.size * reward / importance(s, arm, propensity)
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class EXP3(CompiledPolicy):
    """MetaSD-EXP3 (the paper's Algorithm 7).

    Parameters
    ----------
    gamma : float, default 0.1
        Share of uniform exploration, in (0, 1]. The paper leaves it open; Auer et al. choose
        min(1, sqrt(K ln K / ((e - 1) T))), which is 0.1 at K = 5 and T of about 470 rounds.

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
    rows = 1
    optimistic = (0,)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        checks.number("gamma", self.gamma, 0.0, 1.0, open_low=True)
