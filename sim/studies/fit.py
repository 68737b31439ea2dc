"""The paper's free parameters, fitted once: table 2 for correlation, table 3 for the rest.

Nothing else is looked at; `sim.studies.reproduce` predicts the other tables from what is found
here, frozen in ``sim/tables/fitted.json``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import optimize

from sim.acceptance import Clustered
from sim.jobs import Jobs
from sim.lengths import EndOfText
from sim.paper import DRAFT_LENGTH, Fitted, environment_of, load_table, round_cost
from sim.simulate import simulate

__all__ = ["correlation_errors", "fit", "fit_correlation"]

SWITCHES = (0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.17, 0.2)
BETAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
GAMMAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
BUDGETS = (15, 18, 30, 45, 60, 90, 120, 180)
TOKENS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)


def fit(replications: int = 400, seed: int = 1, jobs: Jobs | None = None) -> Fitted:
    """All free parameters, by least squares of the logarithms over grids."""
    spread, cluster = fit_correlation()
    start = Fitted(spread=spread, cluster=cluster)
    rows = load_table(3)["rows"]
    keys = list(itertools.product(rows, SWITCHES, TOKENS))
    found = (jobs or Jobs()).map(
        _errors, [(t, s, B, start, replications, seed) for t, s, B in keys], "fitting"
    )
    errors = dict(zip(keys, found, strict=True))
    best = (math.inf, start)
    for switch, beta, gamma, budget in itertools.product(SWITCHES, BETAS, GAMMAS, BUDGETS):
        total, tokens = 0.0, {}
        for task in rows:
            sums = {B: _total(errors[task, switch, B], beta, gamma, budget) for B in TOKENS}
            tokens[task] = min(sums, key=lambda B: sums[B])
            total += sums[tokens[task]]
        if total < best[0]:
            found_now = replace(
                start, switch=switch, beta=beta, gamma=gamma, budget=budget, tokens=tokens
            )
            best = (total, found_now)
    return best[1]


def _errors(
    task: str, switch: float, B: int, start: Fitted, replications: int, seed: int
) -> dict[tuple[str, float], float]:
    """Log ratio of simulated to published speedup for every candidate policy."""
    row, cost = load_table(3)["rows"][task], round_cost(3, task, start)
    environment = environment_of(row["drafters"], EndOfText(B), start, cost, switch)
    candidates = {("rand", 0.0): "uniform"}
    candidates |= {("ucb", b): f"ucb:beta={b}" for b in BETAS}
    candidates |= {("exp3", g): f"exp3:gamma={g}" for g in GAMMAS}
    candidates |= {("sh", h): f"sh:budget={h}" for h in BUDGETS}
    out = {}
    for key, policy in candidates.items():
        runs = simulate(environment, policy, reward="bd", replications=replications, seed=seed)
        speedup = (runs.whole_tokens(DRAFT_LENGTH) / runs.steps).mean()
        out[key] = math.log(speedup / row[key[0]])
    return out


def _total(errors: dict[tuple[str, float], float], beta: float, gamma: float, budget: int) -> float:
    chosen = (("rand", 0.0), ("ucb", beta), ("exp3", gamma), ("sh", budget))
    return sum(errors[key] ** 2 for key in chosen)


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
