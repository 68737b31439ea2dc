r"""The truncated geometric law: how many of N drafted tokens a target accepts.

With an acceptance rate alpha at every position, independent of the others, the number of
accepted drafts has

.. math:: P(k) = \alpha^k (1 - \alpha) \;\text{ for } k < N, \qquad P(N) = \alpha^N

(MetaSD, arXiv 2604.05417, section 3; the law goes back to Leviathan et al. 2023). Every function
takes a scalar or an array of alphas and sums the N terms, which is exact at alpha = 1 as well,
where the textbook quotients are 0 / 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import rel_entr

from metasd_bandits import checks

__all__ = [
    "accepted_pmf",
    "alpha_from_tokens",
    "bernoulli_kl",
    "kl",
    "mean_accepted",
    "tokens_per_round",
    "var_accepted",
]


def accepted_pmf(alpha: float, draft_length: int) -> NDArray[np.float64]:
    """Probabilities of 0..N accepted drafts, shape (N + 1,).

    Parameters
    ----------
    alpha : float
        Acceptance rate of one position, in [0, 1].
    draft_length : int
        N, at least 1.

    Examples
    --------
    >>> accepted_pmf(0.5, 3).tolist()
    [0.5, 0.25, 0.125, 0.125]
    """
    a = checks.number("alpha", alpha, 0.0, 1.0)
    N = checks.integer("draft_length", draft_length, 1)
    p: NDArray[np.float64] = a ** np.arange(N + 1.0) * (1.0 - a)
    p[N] = a**N
    return p


def mean_accepted(alpha: ArrayLike, draft_length: int) -> Any:
    """E[N_acc] = alpha + ... + alpha^N, in [0, N]; a float, or an array shaped like `alpha`.

    Examples
    --------
    >>> mean_accepted(0.5, 3), mean_accepted(1.0, 3)
    (0.875, 3.0)
    """
    return _plain(_powers(alpha, draft_length).sum(axis=-1))


def var_accepted(alpha: ArrayLike, draft_length: int) -> Any:
    """Var[N_acc]; divided by N^2 it is the variance of the block-efficiency reward.

    From E[N_acc^2] = sum of (2 j - 1) alpha^j over j = 1..N.

    Examples
    --------
    >>> var_accepted(0.5, 3)
    1.109375
    """
    powers = _powers(alpha, draft_length)
    second = powers @ (2.0 * np.arange(1, draft_length + 1) - 1.0)
    return _plain(second - powers.sum(axis=-1) ** 2)


def tokens_per_round(alpha: ArrayLike, draft_length: int) -> Any:
    """g(alpha) = 1 + E[N_acc]: the accepted drafts and one token of the target's own.

    Examples
    --------
    >>> tokens_per_round([0.0, 0.5, 1.0], 3).tolist()
    [1.0, 1.875, 4.0]
    """
    return 1.0 + mean_accepted(alpha, draft_length)


def alpha_from_tokens(tokens: float, draft_length: int) -> float:
    """The acceptance rate that gives `tokens` per round: the inverse of `tokens_per_round`.

    Parameters
    ----------
    tokens : float
        Mean tokens per round, in [1, N + 1].

    Examples
    --------
    >>> round(alpha_from_tokens(1.875, 3), 12)
    0.5
    """
    N = checks.integer("draft_length", draft_length, 1)
    g = checks.number("tokens", tokens, 1.0, N + 1.0)
    if g in (1.0, N + 1.0):
        return 0.0 if g == 1.0 else 1.0
    return float(brentq(lambda a: tokens_per_round(a, N) - g, 0.0, 1.0, xtol=1e-15))


def bernoulli_kl(p: ArrayLike, q: ArrayLike) -> Any:
    """KL divergence between Bernoulli laws in nats, with its limits at 0 and 1 (0 ln 0 = 0).

    Examples
    --------
    >>> round(bernoulli_kl(0.1, 0.9), 6), bernoulli_kl(0.0, 0.0), bernoulli_kl(0.5, 1.0)
    (1.75778, 0.0, inf)
    """
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    return _plain(rel_entr(p, q) + rel_entr(1.0 - p, 1.0 - q))


def kl(alpha: ArrayLike, other: ArrayLike, draft_length: int) -> Any:
    r"""KL divergence between two truncated geometric laws of one N, in nats.

    .. math:: \mathrm{KL} = \frac{1 - \alpha^N}{1 - \alpha} \, \mathrm{kl}(\alpha, \alpha')

    the expected number of positions that are looked at times the Bernoulli divergence of one
    (chain rule; ours, proof in docs/theory.md).

    Examples
    --------
    >>> round(kl(0.5, 0.8, 1), 12) == round(bernoulli_kl(0.5, 0.8), 12)
    True
    """
    looked_at = tokens_per_round(alpha, draft_length) - np.asarray(alpha, float) ** draft_length
    divergence = np.asarray(bernoulli_kl(alpha, other))
    return _plain(looked_at * divergence)


def _powers(alpha: ArrayLike, draft_length: int) -> NDArray[np.float64]:
    """alpha^1 .. alpha^N along a new last axis."""
    a = np.asarray(alpha, dtype=float)
    if not np.all((a >= 0.0) & (a <= 1.0)):
        raise checks.ConfigError(f"alpha={checks.shown(alpha)} is outside the allowed range [0, 1]")
    N = checks.integer("draft_length", draft_length, 1)
    powers: NDArray[np.float64] = a[..., None] ** np.arange(1, N + 1)
    return powers


def _plain(x: Any) -> Any:
    """A Python float for a single value, the array otherwise."""
    return float(x) if np.ndim(x) == 0 else x
