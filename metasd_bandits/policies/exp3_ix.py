r"""EXP3-IX: exponential weights on losses whose importance weights are damped.

.. math::

   p_t(i) \propto \exp(-\eta_t \hat L_i), \qquad
   \hat L_{a_t} \leftarrow \hat L_{a_t} + \frac{1 - r_t}{p_t(a_t) + \eta_t / 2}, \qquad
   \eta_t = c \sqrt{\frac{\ln K}{K t}}

The damping ("implicit exploration") keeps estimates bounded, so that the regret bound holds with
high probability and no uniform share has to be paid. Source: Neu (2015), Theorem 1, whose
anytime rate is c = 1. A decision costs O(K), an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import anytime_rate, importance, sampling_rule, softmax
from metasd_bandits.compiled.state import record

__all__ = ["EXP3IX"]


@kernel
def weigh(s):
    softmax(s, s.theta[0] * anytime_rate(s))


@kernel
def update(s, arm, reward, cost, propensity):
    damping = 0.5 * s.theta[0] * anytime_rate(s)
    s.rows[0, arm] -= (1.0 - reward) / (importance(s, arm, propensity) + damping)
    record(s, arm, reward)


@dataclass(frozen=True, eq=False)
class EXP3IX(CompiledPolicy):
    """EXP3 with implicit exploration.

    Parameters
    ----------
    scale : float, default 1.0
        Factor c of the learning rate, positive; 1 is the rate of the theorem.

    Examples
    --------
    >>> policy = EXP3IX()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [30, 99, 71]
    """

    name = "exp3-ix"
    compiled = sampling_rule(weigh, update)
    rows = 1
    optimistic = (0,)
    scale: float = 1.0

    def __post_init__(self) -> None:
        checks.number("scale", self.scale, 0.0, open_low=True)
