"""The paper's tables, predicted from their single-drafter columns (``metasd-sim reproduce``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from metasd_bandits import checks
from metasd_bandits.plotting import COLOURS, new_figure
from sim.acceptance import Clustered
from sim.jobs import Jobs, Task
from sim.paper import (
    DRAFT_LENGTH,
    FITTED_TABLE,
    TABLES,
    Fitted,
    environments_of,
    infer,
    load_fitted,
    load_table,
    round_cost,
)
from sim.report import Interval, Report, mean_interval
from sim.simulate import Runs

__all__ = ["Prediction", "predict_table", "reproduce", "score", "speedup"]

_MARKS = dict(zip(("rand", "exp3", "sh", "ucb-be", "ucb"), "sv^Do", strict=True))


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
        The simulated one; its interval holds the simulation's noise alone.
    """

    table: int
    row: str
    column: str
    paper: float
    predicted: Interval

    @property
    def error(self) -> float:
        """Relative, in percent."""
        return 100.0 * (self.predicted.value / self.paper - 1.0)


def reproduce(
    numbers: Sequence[int] = TABLES,
    *,
    replications: int = 1000,
    seed: int = 0,
    jobs: Jobs | None = None,
    fitted: Fitted | None = None,
) -> Report:
    """Predict the bandit columns of the given tables and compare.

    Parameters
    ----------
    numbers : sequence of int
        Any of `sim.paper.TABLES`. Table 2 compares reward statistics; table 3 is the one that
        the free parameters were fitted on.
    replications, seed : int
    jobs : Jobs, optional
    fitted : Fitted, optional
        Other parameters than the frozen ones.
    """
    fitted = fitted or load_fitted()
    rows: list[dict[str, Any]] = []
    cells: list[Prediction] = []
    for number in numbers:
        if load_table(number)["kind"] == "rewards":
            rows += _reward_rows(number, fitted)
        else:
            cells += predict_table(number, fitted, replications, seed, jobs or Jobs())
            rows += _draft_all_rows(number, fitted)
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
    data: dict[str, Any] = {"fitted": vars(fitted)}
    notes = []
    if cells:
        data["score"] = score(cells, fitted.tables)
        notes = [f"{name}: {value}" for name, value in data["score"].items()]
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
    title = "Tables of arXiv 2604.05417, predicted"
    draw = (lambda: _draw(cells, fitted.tables)) if cells else None
    return Report(title, rows, notes, data, draw)


def predict_table(
    number: int, fitted: Fitted, replications: int, seed: int, jobs: Jobs
) -> list[Prediction]:
    """Every bandit cell of one speedup table."""
    table = load_table(number)
    policies = fitted.policies()
    cells, tasks = [], []
    for name, row in table["rows"].items():
        environments = environments_of(number, name, fitted)
        for column in policies.keys() & row.keys():
            policy, reward = policies[column]
            options = {"reward": reward, "seed": seed}
            cells.append((name, column, row[column], len(environments)))
            tasks += [Task(each, policy, replications, options) for each in environments]
    runs, out = iter(jobs.run(tasks)), []
    for name, column, paper, parts in cells:
        predicted = speedup([next(runs) for _ in range(parts)])
        out.append(Prediction(number, name, column, paper, predicted))
    order = list(policies)
    names = list(table["rows"])
    return sorted(out, key=lambda c: (names.index(c.row), order.index(c.column)))


def speedup(parts: Sequence[Runs]) -> Interval:
    """Mean speedup of all queries together, as the paper averages over prompts.

    Blocks count whole, because the published single-drafter speedups, from which acceptance was
    inferred, already hold what a last block overshoots.
    """
    return mean_interval(
        np.concatenate([runs.whole_tokens(DRAFT_LENGTH) / runs.steps for runs in parts])
    )


def score(
    cells: Sequence[Prediction], fitted_on: Sequence[int] = (FITTED_TABLE,)
) -> dict[str, Any]:
    """How the predictions stand against their goals.

    Parameters
    ----------
    cells : sequence of Prediction
    fitted_on : sequence of int, default (3,)
        Tables whose bandit columns the parameters were fitted to: no predictions.
    """
    fresh = [c for c in cells if c.table not in fitted_on]
    out: dict[str, Any] = {}
    if fresh:
        out["UCB, tables not fitted: mean |error| % (goal 4)"] = _mean_error(fresh, "ucb")
        out["all bandit columns, tables not fitted: mean |error| % (goal 8)"] = _mean_error(fresh)
    out["UCB: mean |error| %"] = _mean_error(cells, "ucb")
    out["all bandit columns: mean |error| %"] = _mean_error(cells)
    order, wrong = _order(cells)
    if not math.isnan(order):
        out["rows with the right order of policies % (goal 90)"] = order
        out["rows in another order"] = wrong
    odd = [c for c in cells if c.row in load_table(c.table).get("outliers", ())]
    if fresh and odd:
        usual = [c for c in cells if c not in odd]
        rest = [c for c in fresh if c not in odd]
        out["outliers"] = list(dict.fromkeys(f"{c.table} {c.row}" for c in odd))
        out["without them: UCB, tables not fitted: mean |error| %"] = _mean_error(rest, "ucb")
        if not math.isnan(order := _order(usual)[0]):
            out["without them: rows with the right order of policies %"] = order
    learned: dict[int, list[float]] = {}
    for c in cells:
        if c.column == "ucb":
            learned.setdefault(c.table, []).append(c.error)
    out["UCB, mean error % by table"] = {
        table: round(float(np.mean(errors)), 1) for table, errors in learned.items()
    }
    worst = sorted(cells, key=lambda c: -abs(c.error))[:5]
    out["largest errors"] = [f"{c.table} {c.row} {c.column} {c.error:+.1f} %" for c in worst]
    return out


def _mean_error(cells: Sequence[Prediction], column: str | None = None) -> float:
    errors = [abs(c.error) for c in cells if column in (None, c.column)]
    return round(float(np.mean(errors)), 2) if errors else math.nan


def _order(cells: Sequence[Prediction]) -> tuple[float, list[str]]:
    """Percent of the rows of several columns that are predicted in the paper's order; the others.

    NaN where no row has several columns.
    """
    rows: dict[tuple[int, str], list[Prediction]] = {}
    for c in cells:
        rows.setdefault((c.table, c.row), []).append(c)
    right = {key: _same_order(row) for key, row in rows.items() if len(row) > 1}
    share = 100.0 * sum(right.values()) / len(right) if right else math.nan
    return round(share, 1), [f"{t} {name}" for (t, name), ok in right.items() if not ok]


def _same_order(row: Sequence[Prediction]) -> bool:
    """No two columns that the paper tells apart are predicted the other way round."""
    return all(
        (a.paper - b.paper) * (a.predicted.value - b.predicted.value) >= 0.0
        for a in row
        for b in row
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


def _draft_all_rows(number: int, fitted: Fitted) -> list[dict[str, Any]]:
    """DraftAll: every drafter drafts, and a forward for each block verifies them in turn.

    The longest accepted run is kept. Drafters fail together more often than the model has it; if
    they did wherever they can, only the best drafter's run would count: the interval's other end.
    Of the published speedups we have the range alone, so the error is the distance from it.
    """
    table = load_table(number)
    if "draft_all" not in table:
        return []
    low, high = table["draft_all"]
    out = []
    for name, row in table["rows"].items():
        cost = round_cost(number, name, fitted)
        alphas, block = infer(np.array(row["drafters"]), fitted, cost)
        model = Clustered(alphas, DRAFT_LENGTH, spread=fitted.spread, cluster=fitted.cluster)
        apart = float(model.tokens_of_all()[0] / block.sum())
        together = float(model.run_law()[0].max(0).sum() / block.sum())
        outside = apart / min(max(apart, low), high) - 1.0
        out.append(
            {
                "table": number,
                "row": name,
                "column": "draft-all",
                "paper": f"{low} to {high}",
                "predicted": str(Interval(apart, together, apart)),
                "error %": round(100.0 * outside, 1),
            }
        )
    return out


def _short(fitted: Fitted) -> str:
    values = {k: v for k, v in vars(fitted).items() if k not in ("tokens", "tables")}
    lengths = ", ".join(f"{task} {B}" for task, B in fitted.tokens.items())
    return ", ".join(f"{k} {v:g}" for k, v in values.items()) + f"; tokens: {lengths}"


def _draw(cells: Sequence[Prediction], fitted_on: Sequence[int]) -> Figure:
    figure, axes = new_figure(width=6.4, height=5.2)
    columns = [column for column in _MARKS if any(c.column == column for c in cells)]
    for column, colour in zip(columns, COLOURS, strict=False):
        for fitted, face in ((True, "none"), (False, colour)):
            of = [c for c in cells if c.column == column and (c.table in fitted_on) == fitted]
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
