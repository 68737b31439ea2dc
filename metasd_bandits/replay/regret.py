r"""Stopping-time regret: how many more rounds (or how much more time) than the best drafter.

.. math:: \mathrm{Reg}(\pi, B) = E[\tau(\pi, B)] - E[\tau(\pi^*, B)]

tau is the number of rounds until B tokens are out. The exact decomposition (BanditSpec, arXiv
2505.15141; the overshoot term is ours, docs/theory.md, theorem 1) is

.. math:: \mathrm{Reg} = \sum_i \frac{g^* - g_i}{g^*} E[n_i(\tau)] + R, \qquad |R| < 1

so *pseudo-regret*, the sum alone, is within a round of the truth and much less noisy. That takes
rounds that are independent of the past given their arm: where ease persists between rounds, a
policy can follow it, and R grows with B. Where drafters cost differently, time takes the place of
rounds and g_i / c_i that of g_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from metasd_bandits import checks
from metasd_bandits.intervals import Estimate, ReplayError
from metasd_bandits.policy import Policy
from metasd_bandits.replay.full import Scope, Source, full_replay
from metasd_bandits.replay.results import ReplayResult, difference
from metasd_bandits.traces.columns import Reader, open_trace

__all__ = [
    "best_fixed",
    "expected_rounds",
    "pseudo_regret",
    "regret_against_best",
    "regret_from_trace",
    "stopping_regret",
    "time_pseudo_regret",
    "time_regret",
]


def expected_rounds(token_pmf: ArrayLike, tokens: int) -> float:
    """E[tau] of one drafter: expected rounds to B tokens, exactly, by the renewal recursion.

    Parameters
    ----------
    token_pmf : (N + 1,) array_like
        Probabilities of 1, 2, ..., N + 1 tokens in a round
        (`metasd_bandits.theory.acceptance.accepted_pmf` gives them for an acceptance rate).
    tokens : int
        B, at least 1. O(B N).

    Examples
    --------
    >>> expected_rounds([0.0, 1.0], 7)
    4.0
    """
    p = np.asarray(token_pmf, dtype=float)
    if p.ndim != 1 or not ((p >= 0.0).all() and math.isclose(p.sum(), 1.0, abs_tol=1e-9)):
        raise checks.ConfigError("token_pmf must be probabilities that sum to 1")
    B = checks.integer("tokens", tokens, 1)
    m = np.zeros(B + 1)
    for b in range(1, B + 1):
        reach = min(b - 1, len(p))
        m[b] = 1.0 + p[:reach] @ m[b - reach : b][::-1]
    return float(m[B])


def stopping_regret(
    rounds: ArrayLike, best_rounds: ArrayLike | float, level: float = 0.95
) -> Estimate:
    """Regret in rounds from repeated runs.

    Parameters
    ----------
    rounds : (R,) array_like
        Rounds of the policy in each run, to the same B tokens.
    best_rounds : (R,) array_like or float
        Rounds of the best drafter: run by run on common random numbers (pairs are subtracted),
        or their exact expectation (`expected_rounds`).
    level : float
        Coverage of the Student interval over runs.
    """
    return _over_runs("stopping-time regret (rounds)", rounds, best_rounds, level)


def time_regret(steps: ArrayLike, best_steps: ArrayLike | float, level: float = 0.95) -> Estimate:
    """Regret in time from repeated runs; as `stopping_regret`, durations in place of rounds."""
    return _over_runs("time regret (steps)", steps, best_steps, level)


def pseudo_regret(
    pulls: ArrayLike, tokens_per_round: Sequence[float], level: float = 0.95
) -> Estimate:
    """Regret in rounds through the exact decomposition, from how often each arm was pulled.

    For rounds that are independent of the past given their arm (docs/theory.md, theorem 1).

    Parameters
    ----------
    pulls : (R, K) array_like
        Pulls of each arm in each run, up to its B tokens.
    tokens_per_round : sequence of float, shape (K,)
        g_i, at least 1.
    level : float
    """
    n, g = _pulls(pulls), _positive("tokens_per_round", tokens_per_round)
    return _over_runs("pseudo-regret (rounds)", n @ (1.0 - g / g.max()), 0.0, level)


def time_pseudo_regret(
    pulls: ArrayLike,
    tokens_per_round: Sequence[float],
    steps_per_round: Sequence[float],
    level: float = 0.95,
) -> Estimate:
    r"""Time regret through its decomposition (ours, docs/theory.md, theorem 3).

    .. math:: \sum_i c_i \Bigl(1 - \frac{\rho_i}{\rho^*}\Bigr) E[n_i], \qquad \rho_i = g_i / c_i

    Parameters
    ----------
    pulls : (R, K) array_like
    tokens_per_round, steps_per_round : sequence of float, shape (K,)
        g_i and c_i, an arm's mean tokens and mean duration, positive.
    level : float
    """
    n = _pulls(pulls)
    g = _positive("tokens_per_round", tokens_per_round)
    c = _positive("steps_per_round", steps_per_round)
    rate = g / c
    return _over_runs("time pseudo-regret (steps)", n @ (c * (1.0 - rate / rate.max())), 0.0, level)


def regret_from_trace(
    source: Source,
    policy: str | Policy,
    tokens: int,
    *,
    scope: Scope = "query",
    seeds: Sequence[int] = (0,),
    level: float = 0.95,
) -> dict[str, Estimate]:
    """Regret per query on a full-information trace, in rounds and, where timed, in steps.

    The policy and every fixed drafter are replayed on the same rounds and subtracted query by
    query. The comparator is the drafter that is best on this very trace, which flatters it a
    little (by less than its own standard error) and errs on the safe side.

    Returns
    -------
    dict
        ``rounds`` -> `Estimate`, and ``steps`` -> `Estimate` where rounds were timed.

    Raises
    ------
    ReplayError
        As `full_replay`, or if queries are too short for B tokens.
    """
    reader = open_trace(source)
    played = full_replay(reader, policy, scope=scope, seeds=seeds, tokens=tokens, level=level)
    return {e.quantity.split()[2]: e for e in regret_against_best(reader, played, tokens)}


def regret_against_best(reader: Reader, played: ReplayResult, tokens: int) -> list[Estimate]:
    """Regret of a full replay on its own trace, ``regret in rounds`` and ``regret in steps``."""
    level = played["reward per round"].level
    result = []
    for unit in ("rounds", "steps"):
        quantity = f"{unit} to {tokens} tokens"
        if unit == "steps" and quantity in played.unanswered:
            continue
        best = best_fixed(reader, quantity, tokens, level)
        gap = difference(played, best, quantity)
        result.append(replace(gap, quantity=f"regret in {unit} to {tokens} tokens"))
    return result


def best_fixed(
    reader: Reader, quantity: str, tokens: int | None = None, level: float = 0.95
) -> ReplayResult:
    """The full replay of the single drafter that is best by a quantity on this trace."""
    arms = [
        full_replay(reader, f"fixed:arm={i}", tokens=tokens, level=level)
        for i in range(len(reader.header.arms))
    ]
    sign = 1.0 if " to " in quantity else -1.0
    answered = [a for a in arms if quantity in a.estimates]
    if not answered:
        raise ReplayError(arms[0].unanswered[quantity])
    return min(answered, key=lambda a: sign * a[quantity].value)


def _over_runs(quantity: str, values: ArrayLike, best: ArrayLike | float, level: float) -> Estimate:
    x, y = np.asarray(values, dtype=float), np.asarray(best, dtype=float)
    if x.ndim != 1 or len(x) < 2:
        raise checks.ConfigError(f"{quantity} needs at least two runs, in one dimension")
    if y.ndim and y.shape != x.shape:
        raise checks.ConfigError(f"{len(x)} runs cannot be paired with {y.shape} runs of the best")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise checks.ConfigError(f"{quantity} needs finite values: did every run reach B tokens?")
    checks.number("level", level, 0.0, 1.0, open_low=True, open_high=True)
    gap = x - y
    half = float(student.ppf((1.0 + level) / 2.0, len(x) - 1) * gap.std(ddof=1) / math.sqrt(len(x)))
    mean = float(gap.mean())
    R = len(x)
    return Estimate(quantity, mean, mean - half, mean + half, level, "runs", "run", R, R, R, R)


def _pulls(pulls: ArrayLike) -> NDArray[np.float64]:
    n = np.asarray(pulls, dtype=float)
    if n.ndim != 2 or not (n >= 0.0).all():
        raise checks.ConfigError("pulls must be counts, shape (runs, arms)")
    return n


def _positive(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    return np.array([checks.number(name, v, 0.0, open_low=True) for v in values])
