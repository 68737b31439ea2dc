"""Fit an environment to a trace, and ask it "what if" (``metasd-sim calibrate``, ``what-if``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from metasd_bandits.plotting import COLOURS, new_figure
from metasd_bandits.traces.jsonl import read_trace
from sim.acceptance import Clustered
from sim.calibration import Calibration, calibrate, save_environment
from sim.environment import Environment
from sim.jobs import Jobs, Task
from sim.report import Interval, Report, mean_interval
from sim.simulate import Runs

__all__ = ["calibrate_study", "what_if"]


def calibrate_study(
    path: Path,
    *,
    save: Path | None = None,
    replications: int = 1000,
    draws: int = 100,
    seed: int = 0,
    jobs: Jobs | None = None,
) -> Report:
    """Fit a trace, check the fit, and simulate the trace's own policy beside it.

    Parameters
    ----------
    path : Path
        A trace.
    save : Path, optional
        Where to keep the fitted environment (JSON).
    replications, draws, seed : int
        Simulated queries; bootstrap samples; seed of both.
    jobs : Jobs, optional
    """
    fitted = calibrate(read_trace(path), draws=draws, seed=seed)
    options = {"reward": fitted.reward, "seed": seed}
    task = Task(fitted.environment, fitted.policy, replications, options)
    simulated = _tokens_per_round((jobs or Jobs()).run([task])[0])
    real = fitted.tokens_per_round
    agree = bool(simulated.low <= real.high and real.low <= simulated.high)
    rows = []
    for i, name in enumerate(fitted.arms):
        rows.append(
            {
                "drafter": name,
                "rounds": int(fitted.rounds[i]),
                "alpha": fitted.intervals[f"alpha of {name}"],
                "accepted, trace": float(fitted.observed[i] @ np.arange(fitted.observed.shape[1])),
                "accepted, law": float(fitted.fitted[i] @ np.arange(fitted.fitted.shape[1])),
                "fit p-value": float(fitted.p_values[i]),
            }
        )
    model = fitted.environment.acceptance
    assert isinstance(model, Clustered)
    notes = [
        f"spread {fitted.intervals['spread']}, persistence {model.persistence:.3g}",
        f"tokens per round under {fitted.policy!r}: trace {real}, simulated {simulated}: "
        + ("they agree" if agree else "they do not agree"),
    ]
    if save is not None:
        save_environment(fitted, save)
        notes.append(f"environment: {save}")
    data = {
        "tokens per round": {"trace": real, "simulated": simulated, "agree": agree},
        "observed": fitted.observed,
        "fitted": fitted.fitted,
        "persistence": model.persistence,
    }
    return Report(f"Fit to {path.name}", rows, notes, data, lambda: _draw(fitted))


def what_if(
    environment: Environment,
    arms: Sequence[str],
    policies: Sequence[str],
    *,
    reward: str,
    draft_length: int | None = None,
    switch: float | None = None,
    replications: int = 1000,
    seed: int = 0,
    jobs: Jobs | None = None,
) -> Report:
    """Policies in a fitted environment, with another draft length or switching cost if given.

    Every query of every policy meets the same random numbers.
    """
    model, costs = environment.acceptance, environment.costs
    if draft_length is not None:
        assert isinstance(model, Clustered)
        model = dataclasses.replace(model, draft_length=draft_length)
    if switch is not None:
        costs = dataclasses.replace(costs, switch=switch)
    changed = Environment(model, environment.lengths, environment.schedule, costs)
    options = {"reward": reward, "seed": seed}
    runs = (jobs or Jobs()).run([Task(changed, p, replications, options) for p in policies])
    rows: list[dict[str, Any]] = []
    for policy, r in zip(policies, runs, strict=True):
        shares = r.pulls.sum((0, 1)) / r.pulls.sum()
        rows.append(
            {
                "policy": policy,
                "tokens per round": _tokens_per_round(r),
                "speedup": mean_interval(r.speedup),
                "switches per query": float(r.switches.mean()),
                **{f"share of {name}": float(s) for name, s in zip(arms, shares, strict=True)},
            }
        )
    return Report(f"What if: N = {changed.draft_length}, reward {reward}", rows)


def _tokens_per_round(runs: Runs) -> Interval:
    """Tokens over rounds, of all queries together."""
    ratio = float(runs.tokens.sum() / runs.rounds.sum())
    spread = mean_interval((runs.tokens - ratio * runs.rounds) / runs.rounds.mean())
    half = (spread.high - spread.low) / 2
    return Interval(ratio, ratio - half, ratio + half)


def _draw(fitted: Calibration) -> Figure:
    K, cells = fitted.observed.shape
    figure, panels = new_figure(1, K, 1.4 + 2.6 * K, 3.2)
    k = np.arange(cells)
    for i, axes in enumerate(np.atleast_1d(panels)):
        error = np.sqrt(fitted.observed[i] * (1 - fitted.observed[i]) / fitted.rounds[i])
        axes.bar(
            k, fitted.observed[i], 0.7, yerr=1.96 * error, color="#cccccc", ecolor="#555555",
            label="trace",
        )  # fmt: skip
        axes.plot(k, fitted.fitted[i], "o-", color=COLOURS[0], label="fitted law")
        axes.set(title=fitted.arms[i], xlabel="accepted drafts", ylim=(0, None))
        if i == 0:
            axes.set(ylabel="share of rounds")
            axes.legend()
    return figure
