r"""The paper's assumption: acceptance rates are independent over positions, with mean alpha.

With rates constant at alpha the accepted drafts are a geometric variable truncated at N,

.. math:: P(N_{acc} = k) = \alpha^k (1 - \alpha) \;(k < N), \qquad P(N_{acc} = N) = \alpha^N,

and block divergence is alpha itself, without noise. (`sim.acceptance.Clustered` adds noise and
correlation and has this model as a special case.) Source: MetaSD (arXiv 2604.05417), section 2.
One uniform number a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.kernel import kernel
from metasd_bandits.stream import uniform
from sim.acceptance.base import AcceptanceModel, rates_by_domain

__all__ = ["IID"]


class Parameters(NamedTuple):
    """Rates (D, K), their logarithms (D, K), and N."""

    alpha: NDArray[np.float64]
    log_alpha: NDArray[np.float64]
    N: int


@kernel
def accepted_run(v, log_alpha, N):
    """Length of the accepted run for v uniform in (0, 1]: the largest k with v <= alpha^k."""
    if log_alpha == 0.0:
        return N
    run = math.log(v) / log_alpha
    return N if run >= N else int(run)


@kernel
def draft(model, memory, arm, place, stream):
    alpha, log_alpha = model.alpha[place.domain, arm], model.log_alpha[place.domain, arm]
    if place.weight > 0.0:
        alpha += place.weight * (model.alpha[place.to, arm] - alpha)
        log_alpha = math.log(alpha) if alpha > 0.0 else -np.inf
    accepted = accepted_run(1.0 - uniform(stream), log_alpha, model.N)
    return accepted, accepted / model.N, alpha


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
        with np.errstate(divide="ignore"):
            return Parameters(self.alphas, np.log(self.alphas), self.draft_length)

    def tokens_per_round(self) -> NDArray[np.float64]:
        return (self.alphas[..., None] ** np.arange(self.draft_length + 1)).sum(-1)

    def expected_reward(self, reward: str) -> NDArray[np.float64]:
        checks.choice("reward", reward, ("be", "bd"))
        return self.alphas if reward == "bd" else (self.tokens_per_round() - 1) / self.draft_length
