"""The paper's free parameters, fitted once: table 2 for correlation, table 3 for the rest.

Nothing else is looked at; `sim.studies.reproduce` predicts the other tables from what is found
here, frozen in ``sim/tables/fitted.json``. Fitted to every table, the same parameters predict
nothing, but tell how near this model can come at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import optimize

from metasd_bandits import checks
from sim.acceptance import Clustered
from sim.jobs import Jobs
from sim.paper import (
    DRAFT_LENGTH,
    FITTED_TABLE,
    TABLES,
    Fitted,
    environments_of,
    load_table,
    speedup,
    task_of,
)
from sim.simulate import simulate

__all__ = ["REFITS", "correlation_errors", "fit", "fit_correlation", "on_edge"]

SWITCHES = (0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.17, 0.2)
TOKENS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
# Bandit column -> the parameter of its policy, and its values
GRIDS: dict[str, tuple[str, tuple[float, ...]]] = {
    "rand": ("round_cost", (Fitted.round_cost,)),
    "ucb": ("beta", (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)),
    "exp3": ("gamma", (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)),
    "sh": ("budget", (15, 18, 30, 45, 60, 90, 120, 180)),
}

# What `fit` may look at, as the command line names it
REFITS: dict[str, dict[str, Any]] = {
    str(FITTED_TABLE): {},
    "all": {"numbers": [t for t in TABLES if t != 2], "columns": ["ucb"], "replications": 300},
}


def fit(
    replications: int = 400,
    seed: int = 1,
    jobs: Jobs | None = None,
    numbers: Sequence[int] = (FITTED_TABLE,),
    columns: Sequence[str] = tuple(GRIDS),
) -> Fitted:
    """All free parameters, by least squares of the logarithms over grids.

    Parameters
    ----------
    replications, seed : int
    jobs : Jobs, optional
    numbers : sequence of int, default (3,)
        Tables of speedups to fit; what these hold is no longer predicted.
    columns : sequence of str
        Their bandit columns to fit: keys of `GRIDS`.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a table is not kept or a column is unknown.
    """
    for column in columns:
        checks.choice("column", column, GRIDS)
    spread, cluster = fit_correlation()
    start = Fitted(spread=spread, cluster=cluster, tables=tuple(numbers))
    rows = [(n, name) for n in numbers for name in load_table(n)["rows"]]
    keys = list(itertools.product(rows, SWITCHES, TOKENS))
    work = [(*row, s, B, start, tuple(columns), replications, seed) for row, s, B in keys]
    # squared errors by task, switch and tokens; then by column and value of its parameter
    loss: dict[tuple[str, float, int], dict[tuple[str, float], float]] = {}
    for ((number, name), switch, B), errors in zip(
        keys, (jobs or Jobs()).map(_errors, work, "fitting"), strict=True
    ):
        sums = loss.setdefault((task_of(number, name), switch, B), {})
        for cell, error in errors.items():
            sums[cell] = sums.get(cell, 0.0) + error**2
    best = (math.inf, start)
    for switch, *values in itertools.product(SWITCHES, *(GRIDS[c][1] for c in columns)):
        total, tokens = 0.0, {}
        for task in dict.fromkeys(task_of(*row) for row in rows):
            least = min((_total(loss[task, switch, B], columns, values), B) for B in TOKENS)
            total, tokens[task] = total + least[0], least[1]
        if total < best[0]:
            chosen: dict[str, Any] = {GRIDS[c][0]: v for c, v in zip(columns, values, strict=True)}
            best = (total, replace(start, switch=switch, tokens=tokens, **chosen))
    return best[1]


def _errors(
    number: int,
    name: str,
    switch: float,
    B: int,
    start: Fitted,
    columns: Sequence[str],
    replications: int,
    seed: int,
) -> dict[tuple[str, float], float]:
    """Log ratio of simulated to published speedup, by column and value of its parameter."""
    row = load_table(number)["rows"][name]
    fitted = replace(start, switch=switch, tokens={task_of(number, name): B})
    environments = environments_of(number, name, fitted)
    out = {}
    for column in columns:
        field, values = GRIDS[column]
        for value in values if column in row else ():
            chosen: dict[str, Any] = {field: value}
            policy, reward = replace(fitted, **chosen).policies()[column]
            runs = [
                simulate(each, policy, reward=reward, replications=replications, seed=seed)
                for each in environments
            ]
            out[column, value] = math.log(speedup(runs).value / row[column])
    return out


def _total(
    loss: dict[tuple[str, float], float], columns: Sequence[str], values: Sequence[float]
) -> float:
    return sum(loss.get(cell, 0.0) for cell in zip(columns, values, strict=True))


def on_edge(fitted: Fitted) -> list[str]:
    """Each value at an end of its grid, where a wider grid might have found another."""
    values: list[tuple[str, float, tuple[float, ...]]] = [("switch", fitted.switch, SWITCHES)]
    values += [(name, getattr(fitted, name), g) for name, g in GRIDS.values() if len(g) > 1]
    values += [(f"tokens of {task}", B, TOKENS) for task, B in fitted.tokens.items()]
    return [
        f"{name} {x:g} (grid {min(grid):g} to {max(grid):g})"
        for name, x, grid in values
        if not min(grid) < x < max(grid)
    ]


def fit_correlation() -> tuple[float, float]:
    """spread and cluster that come nearest to table 2's moments, rounded to 0.05."""

    def loss(x: Any) -> float:
        return float(np.mean(np.square(list(correlation_errors(*np.clip(x, 0.0, 1.0)).values()))))

    found = optimize.minimize(loss, (0.6, 0.15), method="Nelder-Mead", options={"xatol": 0.01})
    spread, cluster = np.round(np.clip(found.x, 0.0, 1.0) / 0.05) * 0.05
    return round(float(spread), 2), round(float(cluster), 2)


def correlation_errors(spread: float, cluster: float) -> dict[tuple[str, str], float]:
    """Log ratio of the model's to the published moment, by (drafter, moment) of table 2."""
    rows = load_table(2)["rows"]
    alphas = [row["bd_mean"] for row in rows.values()]
    model = Clustered(alphas, DRAFT_LENGTH, spread=float(spread), cluster=float(cluster))
    moments = model.moments()
    return {
        (name, key): math.log(moments[key][0, i] / row[key])
        for i, (name, row) in enumerate(rows.items())
        for key in ("be_mean", "be_var", "bd_var")
    }
