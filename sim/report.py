"""What a study found: a table, notes, a picture, or one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scipy import stats

from metasd_bandits.plotting import line_with_band, save_figure, style

__all__ = ["Interval", "Report", "line_with_interval", "mean_interval"]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"


def mean_interval(values: Any, level: float = 0.95) -> Interval:
    """The mean of independent values with Student's interval; NaN ends for a single value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if x.size < 2:
        return Interval(mean, math.nan, math.nan)
    half = stats.t.ppf((1 + level) / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size)
    return Interval(mean, mean - half, mean + half)


def line_with_interval(
    axes: Axes,
    x: ArrayLike,
    cells: Sequence[Interval],
    label: str,
    line: dict[str, Any],
    least: float = -math.inf,
) -> None:
    """A line through estimates with the band of their intervals, cut below at `least`."""
    mean, low, high = (
        np.maximum([getattr(c, end) for c in cells], least) for end in ("value", "low", "high")
    )
    line_with_band(axes, x, mean, low, high, label, line)


@dataclass
class Report:
    """The outcome of one study.

    Attributes
    ----------
    title : str
    rows : list of dict
        The table: each row maps column names to text, numbers or `Interval`.
    notes : list of str
        What a reader should know before believing the table.
    data : dict
        More than the table shows, for ``--json``.
    draw : callable, optional
        Makes the picture.
    passed : bool
        False where something that was checked failed; the command's exit status.
    """

    title: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[], Figure] | None = None
    passed: bool = True

    def show(self, console: Console) -> None:
        """Print the table and the notes."""
        table = Table(title=self.title, title_justify="left")
        for name in self.rows[0] if self.rows else ():
            numeric = all(isinstance(row.get(name), (int, float)) for row in self.rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*[escape(_cell(value)) for value in row.values()])
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}", highlight=False, markup=False)

    def to_json(self) -> str:
        """The report as one strict JSON object."""
        whole = {"title": self.title, "rows": self.rows, "notes": self.notes, **self.data}
        return json.dumps(_plain({**whole, "passed": self.passed}), allow_nan=False)

    def save_picture(self, path: Path) -> bool:
        """Draw the picture into a file (the ending chooses the format); False if there is none."""
        if self.draw is None:
            return False
        with style():
            save_figure(self.draw(), path)
        return True


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return _short(value)


def _short(x: float) -> str:
    if not math.isfinite(x):
        return "-" if math.isnan(x) else str(x)
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def _plain(value: Any) -> Any:
    """Only what JSON knows: no NaN, no arrays, no intervals."""
    if isinstance(value, Interval):
        return _plain({"value": value.value, "low": value.low, "high": value.high})
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
