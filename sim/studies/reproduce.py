"""The paper's tables, predicted from their single-drafter columns (``metasd-sim reproduce``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.plotting import COLOURS, new_figure
from sim.acceptance import Clustered
from sim.jobs import Jobs, Task
from sim.paper import (
    DRAFT_LENGTH,
    TABLES,
    Fitted,
    environments_of,
    infer,
    load_fitted,
    load_table,
    round_cost,
    speedup,
    was_fitted,
)
from sim.report import Interval, Report, mean_interval
from sim.studies.fit import on_edge

__all__ = ["Prediction", "predict_table", "reproduce", "score"]

_MARKS = dict(zip(("rand", "exp3", "sh", "ucb-be", "ucb", "draft-all"), "sv^DoP", strict=True))
# What is scored -> the column it takes (all, if None), and the goal for its mean |error| in percent
_SCORED: dict[str, tuple[str | None, float | None]] = {
    "UCB": ("ucb", 4.0),
    "all bandit columns": (None, 8.0),
    "DraftAll": ("draft-all", None),
}
_ORDER_GOAL = 90.0


@dataclass(frozen=True)
class Prediction:
    """One bandit cell of a table.

    Attributes
    ----------
    table : int
    row, column : str
    paper : float
        The published speedup.
    predicted : Interval
        The simulated one, from the queries of all seeds; its interval holds their noise alone.
    by_seed : tuple of float
        The same under each seed alone.
    fitted : bool
        Whether parameters were fitted to this row's drafters: no prediction, and not scored.
    """

    table: int
    row: str
    column: str
    paper: float
    predicted: Interval
    by_seed: tuple[float, ...]
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative, in percent."""
        return 100.0 * (self.predicted.value / self.paper - 1.0)

    @property
    def errors(self) -> NDArray[np.float64]:
        """The same under each seed alone."""
        return 100.0 * (np.array(self.by_seed) / self.paper - 1.0)


def reproduce(
    numbers: Sequence[int] = TABLES,
    *,
    replications: int = 500,
    seed: int = 0,
    seeds: int = 5,
    jobs: Jobs | None = None,
    fitted: Fitted | None = None,
) -> Report:
    """Predict the bandit columns of the given tables and compare.

    Parameters
    ----------
    numbers : sequence of int
        Any of `sim.paper.TABLES`. Table 2 compares reward statistics; table 3 is the one that
        the free parameters were fitted on.
    replications : int
        Queries of each cell under each seed.
    seed : int
        The first seed.
    seeds : int
        How many: the scores' intervals are over them. One seed gives no interval.
    jobs : Jobs, optional
    fitted : Fitted, optional
        Other parameters than the frozen ones.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If a table is not kept or a number is out of range.
    """
    fitted = fitted or load_fitted()
    used = range(seed, seed + checks.integer("seeds", seeds, 1))
    rows: list[dict[str, Any]] = []
    cells: list[Prediction] = []
    for number in numbers:
        if load_table(number)["kind"] == "rewards":
            rows += _reward_rows(number, fitted)
        else:
            cells += predict_table(number, fitted, replications, used, jobs or Jobs())
    rows += [
        {
            "table": c.table,
            "row": c.row,
            "column": c.column,
            "paper": c.paper,
            "predicted": str(c.predicted),
            "error %": round(c.error, 1),
        }
        for c in cells
    ]
    data: dict[str, Any] = {"fitted": vars(fitted), "on a grid's edge": on_edge(fitted)}
    notes = []
    if cells:
        data["score"] = score(cells)
        notes = [
            *(f"{name}: {_told(value)}" for name, value in data["score"].items()),
            f"intervals of scores: 95 % over {seeds} seeds of {replications} queries a cell; a "
            "smaller difference between two scores says nothing",
        ]
    notes += [
        f"unexplained in table {number}: {load_table(number)['unexplained']}"
        for number in numbers
        if "unexplained" in load_table(number)
    ]
    tables = ", ".join(map(str, fitted.tables))
    notes.append(
        "acceptance and round cost come from the single-drafter columns; all else was fitted on "
        f"table {tables} (correlation on table 2) and frozen: {_short(fitted)}"
    )
    if edge := data["on a grid's edge"]:
        notes.append(
            "on the edge of the grid they were fitted on, so a wider grid might give others: "
            + ", ".join(edge)
        )
    title = "Tables of arXiv 2604.05417, predicted"
    return Report(title, rows, notes, data, (lambda: _draw(cells)) if cells else None)


def predict_table(
    number: int, fitted: Fitted, replications: int, seeds: Sequence[int], jobs: Jobs
) -> list[Prediction]:
    """Every bandit cell of one speedup table, from `replications` queries under each seed."""
    table = load_table(number)
    policies = fitted.policies()
    cells, tasks = [], []
    for name, row in table["rows"].items():
        environments = environments_of(number, name, fitted)
        for column in policies.keys() & row.keys():
            policy, reward = policies[column]
            cells.append((name, column, row[column], len(environments)))
            tasks += [
                Task(each, policy, replications, {"reward": reward, "seed": seed})
                for seed in seeds
                for each in environments
            ]
    runs, out = iter(jobs.run(tasks)), _draft_all(number, fitted, len(seeds))
    for name, column, paper, parts in cells:
        by_seed = [[next(runs) for _ in range(parts)] for _ in seeds]
        predicted = speedup([each for one in by_seed for each in one])
        alone = tuple(speedup(one).value for one in by_seed)
        seen = was_fitted(number, name, fitted)
        out.append(Prediction(number, name, column, paper, predicted, alone, seen))
    order = ["draft-all", *policies]
    names = list(table["rows"])
    return sorted(out, key=lambda c: (names.index(c.row), order.index(c.column)))


def score(cells: Sequence[Prediction]) -> dict[str, Any]:
    """How the predictions stand against their goals; fitted cells count apart.

    Each score is a mean over seeds with its interval, of what each seed's predictions score.
    """
    fresh = [c for c in cells if not c.fitted]
    out: dict[str, Any] = {}
    for name, (column, goal) in _SCORED.items():
        out |= _mean_error(name, [c for c in fresh if column in (None, c.column)], goal)
    order = _order(fresh)
    if order:
        out["rows with the right order of policies"] = {**order, "goal": _ORDER_GOAL}
        out["rows in another order"] = [
            f"{t} {name}" for (t, name), row in _rows(fresh).items() if not _same_order(row)
        ]
    odd = [c for c in fresh if c.row in load_table(c.table).get("outliers", ())]
    if odd:
        rest = [c for c in fresh if c not in odd]
        out["outliers"] = list(dict.fromkeys(f"{c.table} {c.row}" for c in odd))
        out |= _mean_error("without outliers: UCB", [c for c in rest if c.column == "ucb"])
        if order := _order(rest):
            out["without outliers: rows with the right order of policies"] = order
    for name, (column, _) in _SCORED.items():
        of = [c for c in cells if c.fitted and column in (None, c.column)]
        out |= _mean_error(f"{name}, fitted and so no prediction", of)
    learned: dict[int, list[float]] = {}
    for c in cells:
        if c.column == "ucb":
            learned.setdefault(c.table, []).append(c.error)
    out["UCB, mean error % by table"] = {
        table: round(float(np.mean(errors)), 1) for table, errors in learned.items()
    }
    worst = sorted(fresh, key=lambda c: -abs(c.error))[:5]
    out["largest errors"] = [f"{c.table} {c.row} {c.column} {c.error:+.1f} %" for c in worst]
    return out


def _mean_error(
    name: str, cells: Sequence[Prediction], goal: float | None = None
) -> dict[str, dict[str, Any]]:
    """The score of that name; nothing where there is no cell."""
    if not cells:
        return {}
    by_seed = np.mean([np.abs(c.errors) for c in cells], axis=0)
    found: dict[str, Any] = {"mean |error| %": mean_interval(by_seed), "cells": len(cells)}
    return {name: found | ({} if goal is None else {"goal": goal})}


def _rows(cells: Iterable[Prediction]) -> dict[tuple[int, str], list[Prediction]]:
    """Rows of several columns."""
    rows: dict[tuple[int, str], list[Prediction]] = {}
    for c in cells:
        rows.setdefault((c.table, c.row), []).append(c)
    return {key: row for key, row in rows.items() if len(row) > 1}


def _order(cells: Sequence[Prediction]) -> dict[str, Any]:
    """Percent of the rows of several columns that are predicted in the paper's order."""
    rows = _rows(cells)
    if not rows:
        return {}
    seeds = range(len(cells[0].by_seed))
    right = [np.mean([_same_order(row, seed) for row in rows.values()]) for seed in seeds]
    return {"%": mean_interval(100.0 * np.array(right)), "rows": len(rows)}


def _told(value: Any) -> str:
    """A score in words."""
    if not isinstance(value, dict):
        return ", ".join(value)
    return ", ".join(f"{name} {x}" for name, x in value.items())


def _same_order(row: Sequence[Prediction], seed: int | None = None) -> bool:
    """No two columns that the paper tells apart are predicted the other way round."""
    predicted = [c.predicted.value if seed is None else c.by_seed[seed] for c in row]
    return all(
        (a.paper - b.paper) * (x - y) >= 0.0
        for a, x in zip(row, predicted, strict=True)
        for b, y in zip(row, predicted, strict=True)
    )


def _reward_rows(number: int, fitted: Fitted) -> list[dict[str, Any]]:
    """Table 2: moments of the rewards, mean BD given."""
    table = load_table(number)["rows"]
    alphas = [row["bd_mean"] for row in table.values()]
    model = Clustered(alphas, DRAFT_LENGTH, spread=fitted.spread, cluster=fitted.cluster)
    moments = model.moments()
    return [
        {
            "table": number,
            "row": name,
            "column": key,
            "paper": row[key],
            "predicted": f"{moments[key][0, i]:.3f}",
            "error %": round(100.0 * (float(moments[key][0, i]) / row[key] - 1.0), 1),
        }
        for i, (name, row) in enumerate(table.items())
        for key in ("be_mean", "be_var", "bd_var", "zero")
    ]


def _draft_all(number: int, fitted: Fitted, seeds: int) -> list[Prediction]:
    """DraftAll: every drafter drafts, and a forward for each block verifies them in turn.

    The longest accepted run is kept. Drafters fail together more often than the model has it; if
    they did wherever they can, only the best drafter's run would count: the interval's other end.
    Computed, not simulated, so it is the same under each seed.
    """
    out = []
    for name, row in load_table(number)["rows"].items():
        if "draft-all" not in row:
            continue
        cost = round_cost(number, name, fitted)
        alphas, block = infer(np.array(row["drafters"]), fitted, cost)
        model = Clustered(alphas, DRAFT_LENGTH, spread=fitted.spread, cluster=fitted.cluster)
        apart = float(model.tokens_of_all()[0] / block.sum())
        together = float(model.run_law()[0].max(0).sum() / block.sum())
        predicted, seen = Interval(apart, together, apart), was_fitted(number, name, fitted)
        paper = row["draft-all"]
        out.append(Prediction(number, name, "draft-all", paper, predicted, (apart,) * seeds, seen))
    return out


def _short(fitted: Fitted) -> str:
    values = {k: v for k, v in vars(fitted).items() if k not in ("tokens", "tables")}
    lengths = ", ".join(f"{task} {B}" for task, B in fitted.tokens.items())
    return ", ".join(f"{k} {v:g}" for k, v in values.items()) + f"; tokens: {lengths}"


def _draw(cells: Sequence[Prediction]) -> Figure:
    figure, axes = new_figure(width=6.4, height=5.2)
    columns = [column for column in _MARKS if any(c.column == column for c in cells)]
    for column, colour in zip(columns, COLOURS, strict=False):
        for fitted, face in ((True, "none"), (False, colour)):
            of = [c for c in cells if c.column == column and c.fitted == fitted]
            label = f"{column} (fitted)" if fitted else column
            if of:
                axes.plot(
                    [c.paper for c in of],
                    [c.predicted.value for c in of],
                    _MARKS[column],
                    color=colour,
                    markerfacecolor=face,
                    label=label,
                )
    ends = np.array(axes.get_xlim())
    axes.plot(ends, ends, color="#555555", linewidth=1.0)
    axes.fill_between(ends, 0.92 * ends, 1.08 * ends, color="#bbbbbb", alpha=0.3, linewidth=0)
    axes.set(xlabel="published speedup", ylabel="predicted speedup (band: 8 %)", xlim=ends)
    axes.legend(loc="upper left")
    return figure


def check_numbers(text: str) -> list[int]:
    """Table numbers from the command line: ``all``, or one of those kept."""
    if text == "all":
        return list(TABLES)
    known = {str(n): n for n in TABLES}
    return [known[checks.choice("table", text, known)]]
