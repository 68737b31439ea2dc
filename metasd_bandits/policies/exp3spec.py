r"""EXP3Spec: BanditSpec's exponential weights on losses.

.. math::

   p_t(i) \propto \exp(-\eta_t \hat L_i), \qquad
   \hat L_{a_t} \leftarrow \hat L_{a_t} + \frac{1 - r_t}{p_t(a_t)}, \qquad
   \eta_t = \sqrt{\frac{\ln K}{t K}}

BanditSpec (arXiv 2505.15141) states the loss as (L + 1 - Y) / L for a round of Y in [1, L + 1]
tokens, which is 1 - r for the reward r = (Y - 1) / L. No hyperparameter. A decision costs O(K),
an update O(1).
"""

from __future__ import annotations

from dataclasses import dataclass

from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.compiled.rules import anytime_rate, learn_loss, sampling_rule, softmax

__all__ = ["EXP3Spec"]


@kernel
def weigh(s):
    softmax(s, anytime_rate(s))


@dataclass(frozen=True, eq=False)
class EXP3Spec(CompiledPolicy):
    """BanditSpec's EXP3Spec.

    Examples
    --------
    >>> policy = EXP3Spec()
    >>> policy.reset(n_arms=3, seed=0)
    >>> for _ in range(200):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.5, 0.4][arm])
    >>> policy.pulls.tolist()
    [21, 112, 67]
    """

    name = "exp3spec"
    compiled = sampling_rule(weigh, learn_loss)
    rows = 1
    optimistic = (0,)
