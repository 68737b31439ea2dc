r"""The paper's assumption: acceptance rates are independent over positions, with mean alpha.

With rates constant at alpha the accepted drafts are a geometric variable truncated at N,

.. math:: P(N_{acc} = k) = \alpha^k (1 - \alpha) \;(k < N), \qquad P(N_{acc} = N) = \alpha^N,

and block divergence is alpha itself, without noise. (`sim.acceptance.Clustered` adds noise and
correlation and has this model as a special case.) Source: MetaSD (arXiv 2604.05417), section 2.
One uniform v in (0, 1] a round: N_acc is the number of powers alpha^k, k = 1 .. N, that are not
below v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from sim.acceptance.base import AcceptanceModel, rates_by_domain

__all__ = ["IID"]


class Parameters(NamedTuple):
    """Rates (D, K), and the block efficiencies 0, 1/N .. 1 (N + 1,)."""

    alpha: NDArray[np.float64]
    efficiency: NDArray[np.float64]


@kernel
def draft(model, memory, arm, place, stream):
    alpha = model.alpha[place.domain, arm]
    if place.weight > 0.0:
        alpha += place.weight * (model.alpha[place.to, arm] - alpha)
    v, power, accepted = 1.0 - uniform(stream), 1.0, 0
    for _ in range(model.efficiency.size - 1):
        power *= alpha
        accepted += v <= power  # to the end: a branch would be mispredicted
    return accepted, model.efficiency[accepted], alpha


@dataclass(frozen=True, eq=False)
class IID(AcceptanceModel):
    """Independent, constant acceptance rates: N_acc is a truncated geometric variable.

    Parameters
    ----------
    alphas : array_like, shape (K,) or (D, K)
        Acceptance rate of each drafter, in [0, 1]; one row per domain where a schedule has several.
    draft_length : int, default 5
        N, at least 1.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a rate or the draft length is out of range, or there is no drafter.

    Examples
    --------
    >>> IID([0.5, 1.0], draft_length=3).tokens_per_round()
    array([[1.875, 4.   ]])
    """

    alphas: Any
    draft_length: int = 5
    drifts = True
    draft = staticmethod(draft)

    def __post_init__(self) -> None:
        checks.integer("draft_length", self.draft_length, 1)
        object.__setattr__(self, "alphas", rates_by_domain("alphas", self.alphas))
        object.__setattr__(self, "n_domains", self.alphas.shape[0])
        object.__setattr__(self, "n_arms", self.alphas.shape[1])

    def parameters(self) -> Parameters:
        return Parameters(self.alphas, np.arange(self.draft_length + 1) / self.draft_length)

    def tokens_per_round(self) -> NDArray[np.float64]:
        return (self.alphas[..., None] ** np.arange(self.draft_length + 1)).sum(-1)

    def expected_reward(self, reward: str) -> NDArray[np.float64]:
        checks.choice("reward", reward, ("be", "bd"))
        return self.alphas if reward == "bd" else (self.tokens_per_round() - 1) / self.draft_length
