r"""An environment fitted to a recorded trace by maximum likelihood.

The law fitted is `Clustered` with one rate for a whole block (cluster = 1), whose accepted drafts
are beta-geometric: with :math:`m = 1/s - 1`,

.. math:: P(N_{acc} \ge k) = \prod_{j=0}^{k-1} \frac{m \alpha_i + j}{m + j},

an acceptance rate for each drafter and one spread s for all (s = 0 is the truncated geometric law).
Persistence between rounds is matched to the correlation of neighbouring rounds, and costs are the
trace's mean durations in plain steps. The last round of a query, which a limit may have cut, is
left out; a block that was drafted short counts like one that was rejected, so that tokens per
round are what they were. Intervals come from resampling whole queries.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from metasd_bandits import checks
from metasd_bandits.traces.jsonl import Trace, TraceHeader
from sim.acceptance import Clustered
from sim.costs import Costs
from sim.environment import Environment
from sim.files import save_json
from sim.lengths import Empirical
from sim.report import Interval
from sim.simulate import sample_rounds

__all__ = ["Calibration", "calibrate", "load_environment", "run_law", "save_environment"]


@dataclass(frozen=True)
class Calibration:
    """A fitted environment and how well it fits.

    Attributes
    ----------
    environment : Environment
    arms : tuple of str
    rounds : (K,) int
        Rounds of each drafter that entered the fit.
    observed, fitted : (K, N + 1)
        Shares of 0..N accepted drafts in the trace, and in the law.
    p_values : (K,)
        Chi-square test that the law made the trace's counts; NaN with fewer than 20 rounds.
    intervals : dict
        Parameter name -> interval over resampled queries.
    policy, reward : str
        The trace's own.
    tokens_per_round : Interval
        What the trace had, over queries.
    """

    environment: Environment
    arms: tuple[str, ...]
    rounds: NDArray[np.int64]
    observed: NDArray[np.float64]
    fitted: NDArray[np.float64]
    p_values: NDArray[np.float64]
    intervals: dict[str, Interval]
    policy: str
    reward: str
    tokens_per_round: Interval


def _competing(trace: Trace) -> TraceHeader:
    """The header without "none" where it was only what decoding could have fallen back to.

    Under be and bd it is the last arm of every trace and never chosen.
    """
    header, last = trace.header, len(trace.header.arms) - 1
    if last and header.arms[last] == "none" and all(round_.arm != last for round_ in trace):
        return dataclasses.replace(header, arms=header.arms[:last])
    return header


def calibrate(trace: Trace, *, draws: int = 100, seed: int = 0) -> Calibration:
    """Fit an environment to a trace.

    Parameters
    ----------
    trace : Trace
        Every drafter needs at least one round ("none" does where it competes).
    draws : int, default 100
        Bootstrap samples of whole queries, for the intervals.
    seed : int

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a drafter has no round, or a query is not longer than one round.
    """
    checks.integer("draws", draws, 2)
    header = _competing(trace)
    N, K = header.draft_length, len(header.arms)
    queries = _queries(trace)
    counts = np.stack([_counts(q, K, N) for q in queries])  # (Q, K, N + 1)
    for name, rounds in zip(header.arms, counts.sum((0, 2)), strict=True):
        if rounds == 0:
            raise checks.ConfigError(
                f"drafter {name!r} has no whole round in the trace; record one with "
                "policy 'uniform'"
            )
    whole = counts.sum(0)
    alphas, spread = _fit(whole)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(queries), (draws, len(queries)))
    again = [_fit(np.maximum(counts[pick].sum(0), 0)) for pick in picks]
    intervals = _intervals(header.arms, alphas, spread, again)
    persistence = _persistence(queries, K, N, alphas, spread, seed)
    model = Clustered(alphas, N, spread=spread, cluster=1.0, persistence=persistence)
    lengths = Empirical([max(1, sum(r.emitted for r in q)) for q in queries])
    fitted = np.array([_pmf(a, spread, N) for a in alphas])
    return Calibration(
        Environment(model, lengths, costs=_costs(trace, K, N)),
        header.arms,
        whole.sum(1),
        whole / whole.sum(1, keepdims=True),
        fitted,
        np.array([_p_value(row, law) for row, law in zip(whole, fitted, strict=True)]),
        intervals,
        header.policy,
        header.reward,
        _tokens_per_round(queries),
    )


def run_law(alpha: float, spread: float, N: int) -> NDArray[np.float64]:
    """P(N_acc >= k) for k = 0..N under the beta-geometric law."""
    if spread <= 0.0:
        return alpha ** np.arange(N + 1.0)
    m, j = 1.0 / spread - 1.0, np.arange(N)
    return np.concatenate([[1.0], np.cumprod((m * alpha + j) / np.maximum(m + j, 1e-300))])


def _pmf(alpha: float, spread: float, N: int) -> NDArray[np.float64]:
    beyond = np.append(run_law(alpha, spread, N), 0.0)
    return np.clip(beyond[:-1] - beyond[1:], 0.0, 1.0)


def _queries(trace: Trace) -> list[list[Any]]:
    found: dict[str, list[Any]] = {}
    for r in trace:
        found.setdefault(r.query, []).append(r)
    return list(found.values())


def _counts(query: list[Any], K: int, N: int) -> NDArray[np.int64]:
    """Rounds of one query by drafter and accepted drafts, without the last one."""
    counts = np.zeros((K, N + 1), dtype=np.int64)
    for r in query[:-1]:
        counts[r.arm, r.accepted] += 1
    return counts


def _fit(counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
    """Maximum likelihood: alphas by drafter for each spread, the spread by line search."""

    def best_alpha(row: NDArray[np.int64], spread: float) -> tuple[float, float]:
        N = row.size - 1
        if row[1:].sum() == 0:
            return 0.0, 0.0

        def cost(alpha: float) -> float:
            return -float(row @ np.log(np.maximum(_pmf(alpha, spread, N), 1e-300)))

        found = optimize.minimize_scalar(cost, bounds=(1e-6, 1 - 1e-6), method="bounded")
        return float(found.x), float(found.fun)

    def total(spread: float) -> float:
        return sum(best_alpha(row, spread)[1] for row in counts)

    spread = float(optimize.minimize_scalar(total, bounds=(0.0, 0.98), method="bounded").x)
    spread = 0.0 if total(0.0) <= total(spread) else spread
    return np.array([best_alpha(row, spread)[0] for row in counts]), spread


def _intervals(
    arms: tuple[str, ...],
    alphas: NDArray[np.float64],
    spread: float,
    again: list[tuple[NDArray[np.float64], float]],
) -> dict[str, Interval]:
    names = [*(f"alpha of {name}" for name in arms), "spread"]
    values = np.append(alphas, spread)
    table = np.array([np.append(a, s) for a, s in again])
    low, high = np.quantile(table, [0.025, 0.975], axis=0)
    return {
        n: Interval(float(v), float(a), float(b))
        for n, v, a, b in zip(names, values, low, high, strict=True)
    }


def _persistence(
    queries: list[list[Any]],
    K: int,
    N: int,
    alphas: NDArray[np.float64],
    spread: float,
    seed: int,
) -> float:
    """rho whose simulated correlation of neighbouring rounds equals the trace's (0 if negative)."""
    laws = np.array([_pmf(a, spread, N) for a in alphas])
    k = np.arange(N + 1.0)
    mean = laws @ k
    deviation = np.sqrt(np.maximum(laws @ k**2 - mean**2, 1e-12))
    scores = [
        np.array([(r.accepted - mean[r.arm]) / deviation[r.arm] for r in q[:-1]]) for q in queries
    ]
    pairs = [(s[:-1], s[1:]) for s in scores if len(s) > 1]
    if not pairs or spread <= 0.0:
        return 0.0
    product = np.concatenate([a * b for a, b in pairs])
    target = float(product.mean())
    if target <= 0.0:
        return 0.0
    arm = int(np.argmax(deviation))
    grid = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97])
    reached = []
    for rho in grid:
        model = Clustered([alphas[arm]], N, spread=spread, cluster=1.0, persistence=float(rho))
        x = sample_rounds(model, 0, rounds=40_000, seed=seed, in_a_row=40_000).accepted
        reached.append(float(np.corrcoef(x[:-1], x[1:])[0, 1]))
    return float(np.interp(target, np.maximum.accumulate(reached), grid))


def _costs(trace: Trace, K: int, N: int) -> Costs:
    """Mean durations in plain steps; a round without a measured step counts one."""
    block = np.ones(K)
    switch: list[float] = []
    for i in range(K):
        steady = [r.step for r in trace if r.arm == i and r.step == r.step and r.owed == 0]
        block[i] = max(float(np.mean(steady)), 1e-6) if steady else 1.0
    for r in trace:
        if r.step == r.step and r.seconds > 0.0 and r.switch_seconds > 0.0:
            switch.append(r.switch_seconds * r.step / r.seconds)
    verify = float(block.min())
    draft = (block - verify) / N
    return Costs(draft=draft, verify=verify, switch=float(np.mean(switch)) if switch else 0.0)


def _p_value(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Chi-square with neighbouring cells merged until each expects five rounds."""
    total = int(counts.sum())
    if total < 20:
        return math.nan
    seen, expected = [0.0], [0.0]
    for n, p in zip(counts, law, strict=True):
        seen[-1] += n
        expected[-1] += total * p
        if expected[-1] >= 5.0:
            seen.append(0.0)
            expected.append(0.0)
    if len(seen) > 1:  # what is left over joins the last whole cell
        for cells in (seen, expected):
            rest = cells.pop()  # popped first: `cells[-2] += cells.pop()` writes to another cell
            cells[-1] += rest
    freedom = len(seen) - 2
    if freedom < 1:
        return math.nan
    x = np.array(seen) - np.array(expected)
    return float(stats.chi2.sf((x**2 / np.array(expected)).sum(), freedom))


def _tokens_per_round(queries: list[list[Any]]) -> Interval:
    """Tokens over rounds with a ratio's interval over queries."""
    tokens = np.array([sum(r.emitted for r in q) for q in queries], dtype=float)
    rounds = np.array([len(q) for q in queries], dtype=float)
    ratio, n = float(tokens.sum() / rounds.sum()), len(queries)
    if n < 2:
        return Interval(ratio, math.nan, math.nan)
    residual = (tokens - ratio * rounds) / rounds.mean()
    half = float(stats.t.ppf(0.975, n - 1) * residual.std(ddof=1) / math.sqrt(n))
    return Interval(ratio, ratio - half, ratio + half)


def save_environment(calibration: Calibration, path: Path) -> None:
    """Write a fitted environment as JSON, beside the name and then renamed."""
    environment = calibration.environment
    model, costs = environment.acceptance, environment.costs
    assert isinstance(model, Clustered)
    assert isinstance(environment.lengths, Empirical)
    content = {
        "format": "metasd-environment",
        "version": 1,
        "arms": calibration.arms,
        "policy": calibration.policy,
        "reward": calibration.reward,
        "acceptance": {
            "alphas": model.alphas[0].tolist(),
            "draft_length": model.draft_length,
            "spread": model.spread,
            "cluster": model.cluster,
            "persistence": model.persistence,
        },
        "costs": {
            "draft": np.asarray(costs.draft).tolist(),
            "verify": costs.verify,
            "switch": costs.switch,
        },
        "lengths": list(environment.lengths.values),
    }
    save_json(content, path)


def load_environment(path: Path) -> tuple[Environment, dict[str, Any]]:
    """A saved environment, and what else its file says (arms, policy, reward).

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If the file is no saved environment, or of another version.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != "metasd-environment":
        raise checks.ConfigError(f"{path} is no saved environment; metasd-sim calibrate makes one")
    if content.get("version") != 1:
        raise checks.ConfigError(
            f"{path} has version {content.get('version')!r}; this release reads 1"
        )
    environment = Environment(
        Clustered(**content["acceptance"]),
        Empirical(content["lengths"]),
        costs=Costs(**content["costs"]),
    )
    return environment, content
