r"""Bounds on stopping-time regret, as plain functions with their assumptions checked.

Regret is Reg(B) = E[rounds of the policy] - E[rounds of always the best drafter] to emit B tokens,
so it counts rounds. g_i is an arm's tokens per round, g* the best one's, and a gap is written
with the quantity it belongs to. What is ours is proved in docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import zeta

from metasd_bandits import checks
from metasd_bandits.theory import acceptance

__all__ = [
    "cascade_upper",
    "exp3_upper",
    "exp3spec_upper",
    "lai_robbins",
    "lower_bound",
    "metasd_ucb_pulls",
    "metasd_ucb_upper",
    "ucbspec_upper",
]


def cascade_upper(
    bins: int,
    budget: int,
    rounds: int,
    *,
    depth: int,
    gap: float = 0.0,
    bonus: float = 3.0,
) -> float:
    r"""Upper bound on the tokens `BlockUCB` loses in T rounds (ours, docs/theory.md, theorem 6).

    .. math:: \min\Bigl\{ K m D + 2 m \sqrt{2 b K m T \ln T}, \;
        2 K m D + \frac{8 b K m^3 \ln T}{\Delta} \Bigr\} + 2 K D^2 \zeta(b - 1)

    against the block that would be best if the chances were known, each round anew; never more
    than m T. The second term of the minimum needs a gap, and the chosen sets' structure is used
    only through m, so that the constants are large (Kveton, Wen, Ashkan, Szepesvari 2015,
    "Combinatorial cascading bandits", for smaller ones where the candidates stay the same).

    Parameters
    ----------
    bins : int
        K, bins of the calibrator (no prior: strength 0, discount 1), at least 1.
    budget : int
        m, nodes of a block, at least 1.
    rounds : int
        T, at least 1.
    depth : int
        D, tokens of the longest path among the candidates, at least 1.
    gap : float, default 0.0
        Delta: every block that is not best loses at least so many tokens; 0 if unknown.
    bonus : float, default 3.0
        b, the calibrator's, above 2.

    Examples
    --------
    >>> round(cascade_upper(2, 1, 100_000, depth=1, gap=0.5))
    1116
    """
    K, m = checks.integer("bins", bins, 1), checks.integer("budget", budget, 1)
    T, D = checks.integer("rounds", rounds, 1), checks.integer("depth", depth, 1)
    b = checks.number("bonus", bonus, 2.0, open_low=True)
    gap = checks.number("gap", gap, 0.0)
    learning = K * m * D + 2.0 * m * math.sqrt(2.0 * b * K * m * T * math.log(T))
    if gap > 0.0:
        learning = min(learning, 2.0 * K * m * D + 8.0 * b * K * m**3 * math.log(T) / gap)
    return min(learning + 2.0 * K * D**2 * float(zeta(b - 1.0)), float(m * T))


def metasd_ucb_upper(
    alphas: Sequence[float],
    draft_length: int,
    tokens: float,
    *,
    reward: str = "bd",
    beta: float = 1.0,
    independent_positions: bool = False,
) -> float:
    r"""Upper bound on the regret of MetaSD-UCB (ours, docs/theory.md, theorem 2).

    .. math:: \mathrm{Reg}(B) \le \sum_{i: \Delta_i > 0} \frac{\Delta^g_i}{g^*}
        \Bigl( \frac{8 \beta^2 \ln B}{\Delta_i^2} + 1 + 2 \zeta(4 \beta^2 m - 2) \Bigr) + 1

    with m = N where BD averages N independent positions, else m = 1. beta = 1, m = 1 gives
    UCB1's 8 ln B / Delta^2 + 1 + pi^2 / 3; beta = 1 / sqrt(N), m = N divides the logarithm by N.

    Parameters
    ----------
    alphas : sequence of float
        Each drafter's acceptance rate, in [0, 1].
    draft_length : int
        N.
    tokens : float
        B, at least 1; an expected B serves as well where B does not depend on the drafters.
    reward : {"bd", "be", "tokens"}
        What the policy learns from; it sets the gaps Delta_i.
    beta : float
        Width of the policy's bonus.
    independent_positions : bool
        Whether BD's positions are independent (given the past, of mean alpha); needs reward "bd".

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If beta^2 m <= 3/4, where the proof's series diverges, or a value is out of range.
    """
    a = _alphas(alphas)
    pulls = metasd_ucb_pulls(
        _gaps(a, draft_length, reward),
        tokens,
        beta=beta,
        positions=_positions(draft_length, reward, independent_positions),
    )
    return float(_share_lost(a, draft_length) @ pulls) + 1.0


def metasd_ucb_pulls(
    gaps: Sequence[float] | NDArray[np.float64],
    tokens: float,
    *,
    beta: float = 1.0,
    positions: int = 1,
) -> NDArray[np.float64]:
    """Bound on E[n_i] of every arm with a positive gap within B rounds, 0 for the others, (K,).

    Parameters
    ----------
    gaps : sequence of float
        Delta_i in the reward's units, in [0, 1].
    tokens : float
        B, at least 1.
    beta : float
    positions : int
        m: how many independent values in [0, 1] a reward averages.
    """
    delta = np.asarray(gaps, dtype=float)
    if not ((delta >= 0.0) & (delta <= 1.0)).all():
        raise checks.ConfigError(f"gaps={gaps!r} are outside the allowed range [0, 1]")
    B = checks.number("tokens", tokens, 1.0)
    m = checks.integer("positions", positions, 1)
    least = math.sqrt(0.75 / m)
    checks.number("beta", beta, least, open_low=True)
    bound = np.zeros_like(delta)
    worse = delta > 0.0
    constant = 1.0 + 2.0 * float(zeta(4.0 * beta**2 * m - 2.0))
    bound[worse] = 8.0 * beta**2 * math.log(B) / delta[worse] ** 2 + constant
    return bound


def ucbspec_upper(
    mean_tokens: Sequence[float], draft_length: int, expected_length: float, delta: float = 0.5
) -> float:
    r"""Upper bound on the regret of UCBSpec (BanditSpec, arXiv 2505.15141).

    .. math:: \sum_{i: \Delta_i > 0} \frac{\Delta_i}{\mu^*} \Bigl(4 + \frac{2 L^2}{\Delta_i^2}
        \bigl(1 + 2 \ln \frac{L K \, E[\mathrm{len}]^2}{\Delta_i \delta} \bigr)\Bigr)
        + \frac{\pi^2 \delta}{6} + K

    Parameters
    ----------
    mean_tokens : sequence of float
        mu_i: tokens of a round with each drafter, in [1, L + 1].
    draft_length : int
        L.
    expected_length : float
        E[len], at least 1: tokens until the text ends, which need not be fixed.
    delta : float
        The policy's confidence parameter, in (0, 1].
    """
    L = checks.integer("draft_length", draft_length, 1)
    mu = np.array([checks.number("mean_tokens", x, 1.0, L + 1.0) for x in mean_tokens])
    length = checks.number("expected_length", expected_length, 1.0)
    checks.number("delta", delta, 0.0, 1.0, open_low=True)
    K, gap = len(mu), mu.max() - mu
    gap = gap[gap > 0.0]
    inside = 1.0 + 2.0 * np.log(L * K * length**2 / (gap * delta))
    worst = (gap / mu.max()) @ (4.0 + 2.0 * L**2 / gap**2 * inside)
    return float(worst + math.pi**2 * delta / 6.0 + K)


def exp3spec_upper(
    n_arms: int, draft_length: int, expected_length: float, best_rounds: float
) -> float:
    r"""Upper bound on the regret of EXP3Spec against any sequence (BanditSpec, arXiv 2505.15141).

    .. math:: 2 L \min\Bigl(\sqrt{\mathrm{len} \, K \ln K}, \;
        2 L K \ln K + \sqrt{\min_i ST_i \, K \ln K}\Bigr)

    Parameters
    ----------
    n_arms : int
        K, at least 2.
    draft_length : int
        L.
    expected_length : float
        len: tokens of the text.
    best_rounds : float
        min_i ST_i: rounds of the best single drafter, in [len / (L + 1), len].
    """
    K = checks.integer("n_arms", n_arms, 2)
    L = checks.integer("draft_length", draft_length, 1)
    length = checks.number("expected_length", expected_length, 1.0)
    rounds = checks.number("best_rounds", best_rounds, length / (L + 1.0), length)
    k = K * math.log(K)
    return 2.0 * L * min(math.sqrt(length * k), 2.0 * L * k + math.sqrt(rounds * k))


def lower_bound(alphas: Sequence[float], draft_length: int, tokens: float = math.e) -> float:
    r"""Asymptotic lower bound on any consistent policy's regret (BanditSpec, arXiv 2505.15141).

    .. math:: \ln(B) \sum_{i: \Delta^g_i > 0} \frac{\Delta^g_i / g^*}{\mathrm{KL}_i}

    with KL_i between the truncated geometric laws of arm i and of the best arm. It holds in the
    limit: Reg / ln(B) comes no lower than the sum (the default, B = e, returns the sum).

    Parameters
    ----------
    alphas : sequence of float
        Each drafter's acceptance rate, in [0, 1].
    draft_length : int
        N.
    tokens : float
        B, at least 1.
    """
    a = _alphas(alphas)
    B = checks.number("tokens", tokens, 1.0)
    worse = a < a.max()
    divergence = acceptance.kl(a[worse], np.full(int(worse.sum()), a.max()), draft_length)
    return float(math.log(B) * (_share_lost(a, draft_length)[worse] / divergence).sum())


def lai_robbins(means: Sequence[float], horizon: float = math.e) -> float:
    r"""Asymptotic lower bound on the reward lost by any consistent policy on Bernoulli arms.

    .. math:: \ln(T) \sum_{i: \Delta_i > 0} \Delta_i / \mathrm{kl}(\mu_i, \mu^*)

    Source: Lai and Robbins (1985). The default horizon, e, returns the sum.

    Parameters
    ----------
    means : sequence of float
        In [0, 1].
    horizon : float
        T, at least 1, in rounds.

    Examples
    --------
    >>> round(lai_robbins([0.9, 0.6]), 6)
    0.96389
    """
    mu = np.array([checks.number("means", x, 0.0, 1.0) for x in means])
    T = checks.number("horizon", horizon, 1.0)
    worse = mu < mu.max()
    divergence = np.asarray(acceptance.bernoulli_kl(mu[worse], mu.max()))
    return float(math.log(T) * ((mu.max() - mu[worse]) / divergence).sum())


def exp3_upper(n_arms: int, horizon: float, gamma: float | None = None) -> float:
    r"""Upper bound on the reward that EXP3 loses to the best arm, against any sequence.

    .. math:: (e - 1) \gamma \, G + \frac{K \ln K}{\gamma}, \qquad G \le T

    Source: Auer, Cesa-Bianchi, Freund and Schapire (2002), theorem 3.1. Without `gamma` the best
    one is taken, min(1, sqrt(K ln K / ((e - 1) T))), which gives 2.63 sqrt(T K ln K).

    Parameters
    ----------
    n_arms : int
        K, at least 2.
    horizon : float
        T, or a bound G on the best arm's total reward.
    gamma : float, optional
        In (0, 1].
    """
    K = checks.integer("n_arms", n_arms, 2)
    G = checks.number("horizon", horizon, 0.0, open_low=True)
    k = K * math.log(K)
    if gamma is None:
        gamma = min(1.0, math.sqrt(k / ((math.e - 1.0) * G)))
    gamma = checks.number("gamma", gamma, 0.0, 1.0, open_low=True)
    return (math.e - 1.0) * gamma * G + k / gamma


def _alphas(alphas: Sequence[float]) -> NDArray[np.float64]:
    if not len(alphas):
        raise checks.ConfigError("alphas is empty; give one acceptance rate per drafter")
    return np.array([checks.number("alphas", a, 0.0, 1.0) for a in alphas])


def _share_lost(alphas: NDArray[np.float64], draft_length: int) -> NDArray[np.float64]:
    """(g* - g_i) / g*: what part of a round each pull of arm i wastes."""
    g = acceptance.tokens_per_round(alphas, draft_length)
    return np.asarray(1.0 - g / g.max())


def _gaps(alphas: NDArray[np.float64], draft_length: int, reward: str) -> NDArray[np.float64]:
    checks.choice("reward", reward, ("bd", "be", "tokens"))
    accepted = acceptance.mean_accepted(alphas, draft_length)
    mean = {
        "bd": alphas,
        "be": accepted / draft_length,
        "tokens": (accepted + 1.0) / (draft_length + 1.0),
    }[reward]
    return np.asarray(mean.max() - mean)


def _positions(draft_length: int, reward: str, independent: bool) -> int:
    if independent and reward != "bd":
        raise checks.ConfigError(
            f"independent_positions goes with reward 'bd', which averages them, not {reward!r}"
        )
    return draft_length if independent else 1
