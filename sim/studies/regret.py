"""Stopping-time regret against B, between its bounds (``metasd-sim regret``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from metasd_bandits import checks, make_policy
from metasd_bandits.plotting import line_styles, new_figure
from metasd_bandits.policies.ucb import UCB
from metasd_bandits.theory import bounds
from sim.acceptance import IID, AcceptanceModel
from sim.environment import Environment
from sim.jobs import Jobs, Task
from sim.report import Interval, Report, line_with_interval, mean_interval
from sim.simulate import Runs

__all__ = ["growth_exponent", "regret_curves", "regret_study"]


def regret_study(
    acceptance: AcceptanceModel,
    policies: Sequence[str],
    *,
    tokens: int = 100_000,
    points: int = 12,
    reward: str = "bd",
    replications: int = 200,
    seed: int = 0,
    jobs: Jobs | None = None,
) -> Report:
    """Regret of each policy at B tokens, B from 100 to `tokens`, and how it grows.

    Reg(B) is E[rounds of the policy] - E[rounds of always the best drafter], both on the same
    random numbers; one run gives all B, because a policy is not told B.

    Parameters
    ----------
    acceptance : AcceptanceModel
        Stationary (its domain 0 is used).
    policies : sequence of str
    tokens, points : int
        The largest B (above 100) and how many values of B.
    reward : str
        What the policies learn from.
    replications, seed : int
    jobs : Jobs, optional
    """
    checks.integer("tokens", tokens, 101)
    checks.integer("points", points, 3)
    grid = np.unique(np.geomspace(100, tokens, points).astype(int))
    best = int(acceptance.tokens_per_round()[0].argmax())
    environment = Environment(acceptance, tokens)
    options = {"reward": reward, "seed": seed, "marks": grid}
    tasks = [Task(environment, p, replications, options) for p in (f"fixed:arm={best}", *policies)]
    oracle, *runs = (jobs or Jobs()).run(tasks)
    curves = {p: regret_curves(r, oracle) for p, r in zip(policies, runs, strict=True)}
    lower = None
    if isinstance(acceptance, IID):
        lower = bounds.lower_bound(acceptance.alphas[0].tolist(), acceptance.draft_length)
    uppers = {p: _upper(acceptance, p, grid, reward) for p in policies}
    g = acceptance.tokens_per_round()[0]
    rows = []
    for policy, run in zip(policies, runs, strict=True):
        regret, pseudo = curves[policy], run.curve_pulls @ (1.0 - g / g.max())
        row = {
            "policy": policy,
            f"regret at B = {tokens}": mean_interval(regret[:, -1]),
            "pseudo-regret": mean_interval(pseudo[:, -1]),
            "growth exponent": growth_exponent(grid, pseudo, seed),
            "per ln B": _slope(np.log(grid), pseudo.mean(0)),
            "best arm": float(run.pulls[:, 0, best].sum() / run.pulls.sum()),
        }
        upper = uppers[policy]
        if upper is not None:
            row["upper bound"] = float(upper[-1])
        rows.append({**row})
    notes = [
        "growth exponent: slope of ln(regret) on ln(B) over the upper half of the Bs; "
        "0 is logarithmic or slower, 1/2 a square root, 1 linear",
    ]
    if lower is not None:
        notes.append(f"lower bound for consistent policies, asymptotically: {lower:.3g} ln B")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, float("nan")) for name in columns} for row in rows]
    data = {
        "B": grid,
        "curves": {p: c.mean(0) for p, c in curves.items()},
        "upper": {p: u for p, u in uppers.items() if u is not None},
        "lower per ln B": lower,
    }
    title = f"Regret in rounds, {replications} runs, reward {reward}"
    return Report(
        title, rows, notes, data, lambda: _draw(grid, curves, uppers, lower), _bounded(rows)
    )


def regret_curves(runs: Runs, oracle: Runs) -> NDArray[np.float64]:
    """Rounds more than the oracle's at each mark, run by run, shape (R, M)."""
    return np.asarray(runs.curve_rounds - oracle.curve_rounds)


def growth_exponent(
    grid: NDArray[np.int64], regret: NDArray[np.float64], seed: int = 0, draws: int = 500
) -> Interval:
    """Slope of ln(mean regret) on ln(B) over the upper half, with a bootstrap interval."""
    upper = np.arange(grid.size // 2, grid.size)
    x = np.log(grid[upper])

    def slope(means: NDArray[np.float64]) -> float:
        return _slope(x, np.log(np.maximum(means[upper], 1e-9)))

    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(regret), (draws, len(regret)))
    slopes = [slope(regret[pick].mean(0)) for pick in picks]
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Interval(slope(regret.mean(0)), float(low), float(high))


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.polyfit(x, y, 1)[0])


def _upper(
    acceptance: AcceptanceModel, policy: str, grid: NDArray[np.int64], reward: str
) -> NDArray[np.float64] | None:
    """The MetaSD-UCB bound at each B, where one is known for this policy and model."""
    made = make_policy(policy)
    if not isinstance(made, UCB) or not isinstance(acceptance, IID) or made.beta**2 <= 0.75:
        return None
    alphas, N = acceptance.alphas[0].tolist(), acceptance.draft_length
    return np.array(
        [bounds.metasd_ucb_upper(alphas, N, B, reward=reward, beta=made.beta) for B in grid]
    )


def _bounded(rows: list[dict[str, object]]) -> bool:
    """No policy's regret is above its own upper bound."""
    for row in rows:
        upper, regret = row.get("upper bound"), row["pseudo-regret"]
        if isinstance(upper, float) and isinstance(regret, Interval) and regret.low > upper:
            return False
    return True


def _draw(
    grid: NDArray[np.int64],
    curves: dict[str, NDArray[np.float64]],
    uppers: dict[str, NDArray[np.float64] | None],
    lower: float | None,
) -> Figure:
    figure, axes = new_figure(width=7.2, height=4.6)
    for (policy, regret), line in zip(curves.items(), line_styles(len(curves)), strict=True):
        intervals = [mean_interval(column) for column in regret.T]
        line_with_interval(axes, grid, intervals, policy, line, least=1e-3)
        upper = uppers[policy]
        if upper is not None:
            bound = {"color": line["color"], "linewidth": 1.0, "linestyle": (0, (1, 3))}
            axes.plot(grid, upper, label=f"{policy},\nupper bound", **bound)
    if lower is not None:
        bound = {"color": "#555555", "linewidth": 1.0, "linestyle": (0, (1, 1))}
        axes.plot(grid, lower * np.log(grid), label="lower bound,\nasymptotic slope", **bound)
    axes.set(xscale="log", yscale="log", xlabel="tokens B", ylabel="regret (rounds)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
