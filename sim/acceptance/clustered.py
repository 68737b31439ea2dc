r"""Acceptance that clusters: a latent difficulty for each round, persistent between rounds (ours).

Position j of round t has the acceptance rate

.. math:: a_{t,j} = F_i^{-1}\bigl(\Phi(\sqrt{c}\, z_{t,i} + \sqrt{1 - c}\, e_{t,j})\bigr),

with :math:`F_i` the Beta law of mean :math:`\alpha_i` and variance :math:`s\,\alpha_i(1-\alpha_i)`,
e standard normal noise, and z the ease of the round, an autoregression of unit variance

.. math:: z_{t} = \rho z_{t-1} + \sqrt{1 - \rho^2}\, \epsilon_t, \qquad
          z_{t,i} = \sqrt{h}\, z_t + \sqrt{1-h}\, z'_{t,i},

of which a share h is common to all drafters. Draft j is accepted with probability
:math:`a_{t,j}`; block divergence is the mean of all N rates. So both rewards come from one draw,
:math:`E[r_{BD}] = \alpha_i` and :math:`P(N_{acc} = 0) = 1 - \alpha_i` hold exactly whatever c and
:math:`\rho` are, and c > 0 makes accepted runs longer and more variable than a geometric law's, as
the paper's Table 2 shows. The Beta law is held as 1,024 equally likely values whose mean is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from metasd_bandits import checks
from metasd_bandits.compiled.draws import normal
from metasd_bandits.compiled.kernel import kernel
from metasd_bandits.compiled.stream import uniform
from sim.acceptance.base import AcceptanceModel, rates_by_domain

__all__ = ["CELLS", "Clustered", "beta_cells"]

CELLS = 1024
# the trapezoidal rule over the ease; for analytic integrands it converges geometrically
_EASE = np.linspace(-8.0, 8.0, 257)
_EASE_WEIGHTS = np.exp(-0.5 * _EASE**2) / np.exp(-0.5 * _EASE**2).sum()


class Parameters(NamedTuple):
    """Rates by cell (D, K, CELLS), N, and c, rho, h."""

    cells: NDArray[np.float64]
    N: int
    cluster: float
    persistence: float
    shared: float


@kernel
def begin(model, memory, stream):
    """Ease of the first round, drawn from its stationary law: common part, then each arm's own."""
    for i in range(memory.size):
        if i == 0 or model.shared < 1.0:
            memory[i] = normal(stream)


@kernel
def draft(model, memory, arm, place, stream):
    rho, h, N = model.persistence, model.shared, model.N
    ease = memory[0]
    if h < 1.0:
        ease = math.sqrt(h) * memory[0] + math.sqrt(1.0 - h) * memory[1 + arm]
    from_round, own = math.sqrt(model.cluster) * ease, math.sqrt(1.0 - model.cluster)
    accepted, running, total = 0, True, 0.0
    for _ in range(N):
        x = from_round + own * normal(stream) if own > 0.0 else from_round
        cell = min(int(0.5 * math.erfc(-x / math.sqrt(2.0)) * CELLS), CELLS - 1)
        rate = model.cells[place.domain, arm, cell]
        if place.weight > 0.0:
            rate += place.weight * (model.cells[place.to, arm, cell] - rate)
        total += rate
        running = (uniform(stream) < rate) and running
        accepted += running
    for i in range(memory.size):  # the text goes on, whichever drafter was used
        if i == 0 or h < 1.0:
            memory[i] = rho * memory[i] + math.sqrt(1.0 - rho * rho) * normal(stream)
    return accepted, accepted / N, total / N


@lru_cache(maxsize=4096)
def beta_cells(alpha: float, spread: float) -> NDArray[np.float64]:
    """The Beta law of mean alpha and variance spread * alpha (1 - alpha), as CELLS values.

    Value m is the mean of the law between its quantiles m / CELLS and (m + 1) / CELLS, so the mean
    of all is alpha to rounding; spread = 0 is the constant alpha, spread = 1 a coin.
    """
    edges = np.linspace(0.0, 1.0, CELLS + 1)
    if spread == 0.0 or alpha in (0.0, 1.0):
        return np.full(CELLS, alpha)
    if spread == 1.0:
        below = np.clip(edges - (1.0 - alpha), 0.0, None)
    else:
        a, b = alpha * (1.0 / spread - 1.0), (1.0 - alpha) * (1.0 / spread - 1.0)
        x, y = special.betaincinv(a, b, edges), special.betaincinv(b, a, 1.0 - edges)
        # E[rate; below the quantile], from whichever end of [0, 1] keeps its digits
        from_zero = alpha * special.betainc(a + 1.0, b, x)
        from_one = alpha - (1.0 - edges) + (1.0 - alpha) * special.betainc(b + 1.0, a, y)
        below = np.where(x < 0.5, from_zero, from_one)
    return np.clip(np.diff(below) * CELLS, 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Clustered(AcceptanceModel):
    """Beta acceptance rates that depend on a latent ease of the text.

    Parameters
    ----------
    alphas : array_like, shape (K,) or (D, K)
        Mean acceptance rate of each drafter, in [0, 1]; one row per domain.
    draft_length : int, default 5
        N, at least 1.
    spread : float, default 0.5
        s in [0, 1]: variance of a rate as a share of alpha (1 - alpha), the most it can be.
    cluster : float, default 0.5
        c in [0, 1]: share of the position's (Gaussian) variance that the whole block has in common.
    persistence : float, default 0.0
        rho in [0, 1): correlation of the ease of neighbouring rounds.
    shared : float, default 1.0
        h in [0, 1]: share of the ease that all drafters have in common.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a value is out of range, or there is no drafter.
    """

    alphas: Any
    draft_length: int = 5
    spread: float = 0.5
    cluster: float = 0.5
    persistence: float = 0.0
    shared: float = 1.0
    drifts = True
    begin = staticmethod(begin)
    draft = staticmethod(draft)

    def __post_init__(self) -> None:
        checks.integer("draft_length", self.draft_length, 1)
        checks.number("spread", self.spread, 0.0, 1.0)
        checks.number("cluster", self.cluster, 0.0, 1.0)
        checks.number("persistence", self.persistence, 0.0, 1.0, open_high=True)
        checks.number("shared", self.shared, 0.0, 1.0)
        object.__setattr__(self, "alphas", rates_by_domain("alphas", self.alphas))
        object.__setattr__(self, "n_domains", self.alphas.shape[0])
        object.__setattr__(self, "n_arms", self.alphas.shape[1])

    def cells(self) -> NDArray[np.float64]:
        """The rates' laws as `draft` reads them, shape (D, K, CELLS)."""
        flat = [beta_cells(float(a), float(self.spread)) for a in self.alphas.ravel()]
        return np.array(flat).reshape(*self.alphas.shape, CELLS)

    def parameters(self) -> Parameters:
        return Parameters(
            self.cells(),
            self.draft_length,
            float(self.cluster),
            float(self.persistence),
            float(self.shared),
        )

    def memory_size(self) -> int:
        return 1 + self.n_arms

    def run_law(self) -> NDArray[np.float64]:
        """P(N_acc >= k) for k = 0..N, shape (D, K, N + 1), by quadrature over the ease."""
        reached, weights = self._reached()
        return np.einsum("dkxn,x->dkn", reached, weights)

    def _reached(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """P(N_acc >= k | ease), shape (D, K, nodes, N + 1), and the weights of the nodes."""
        lengths = np.arange(self.draft_length + 1)
        if self.cluster == 1.0:  # one rate for the whole block
            return self.cells()[..., None] ** lengths, np.full(CELLS, 1.0 / CELLS)
        return self.rate_given_ease(_EASE)[..., None] ** lengths, _EASE_WEIGHTS

    def tokens_of_all(self) -> NDArray[np.float64]:
        """Tokens per round, (D,), where every drafter drafts and the longest accepted run is kept.

        All drafters meet the same ease (shared = 1) and are independent given it.
        """
        reached, weights = self._reached()
        none_reaches = np.prod(1.0 - reached, axis=1)
        return np.einsum("dxn,x->dn", 1.0 - none_reaches, weights).sum(-1)

    def moments(self) -> dict[str, NDArray[np.float64]]:
        """Means and variances of both rewards, each of shape (D, K).

        Keys ``be_mean``, ``be_var``, ``bd_mean``, ``bd_var``, and ``zero`` = P(N_acc = 0). With
        positions j != k of one block, Var[r_BD] = (sigma^2 + (N - 1) Cov(a_j, a_k)) / N.
        """
        N, law, cells = self.draft_length, self.run_law(), self.cells()
        accepted = law[..., 1:].sum(-1)
        second = law[..., 1:] @ (2.0 * np.arange(1, N + 1) - 1.0)
        if self.cluster == 1.0:
            together = (cells**2).mean(-1)
        else:
            together = self.rate_given_ease(_EASE) ** 2 @ _EASE_WEIGHTS
        covariance = together - self.alphas**2
        return {
            "be_mean": accepted / N,
            "be_var": (second - accepted**2) / N**2,
            "bd_mean": self.alphas,
            "bd_var": (cells.var(-1) + (N - 1) * covariance) / N,
            "zero": 1.0 - law[..., 1],
        }

    def rate_given_ease(self, ease: NDArray[np.float64]) -> NDArray[np.float64]:
        """E[a | z] for each value of the ease, shape (D, K, len(ease)); needs cluster < 1."""
        edges = special.ndtri(np.linspace(0.0, 1.0, CELLS + 1))
        own = math.sqrt(1.0 - self.cluster)
        shift = math.sqrt(self.cluster) * np.asarray(ease)[:, None]
        probability = np.diff(special.ndtr((edges - shift) / own), axis=1)
        return np.einsum("dkm,xm->dkx", self.cells(), probability)

    def tokens_per_round(self) -> NDArray[np.float64]:
        return self.run_law().sum(-1)

    def expected_reward(self, reward: str) -> NDArray[np.float64]:
        checks.choice("reward", reward, ("be", "bd"))
        return self.alphas if reward == "bd" else (self.tokens_per_round() - 1) / self.draft_length
