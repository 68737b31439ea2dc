"""Pictures in one style: readable in print, and without colour sight.

Lines differ in dash and marker as well as in colour; the colours are Okabe and Ito's. Nothing here
opens a window: figures are drawn on the Agg canvas and saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "COLOURS",
    "HATCHES",
    "Shares",
    "line_styles",
    "line_with_band",
    "new_figure",
    "plot_coverage",
    "plot_shares",
    "plot_support",
    "save_figure",
    "style",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")  # one more than colours

_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.5,
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's settings for the time of drawing and saving; the user's own stay untouched."""
    with rc_context(_STYLE):
        yield


def new_figure(
    rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 4.0
) -> tuple[Figure, Any]:
    """A figure of the given size (inches) and its axes, on no window system."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns)


def line_styles(n: int) -> list[dict[str, Any]]:
    """Keyword arguments that tell n lines apart by colour, dash and marker."""
    styles = zip(cycle(COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False)
    return [
        {"color": c, "linestyle": d, "marker": m, "markersize": 4.5}
        for c, d, m in islice(styles, n)
    ]


def line_with_band(
    axes: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    label: str,
    line: dict[str, Any],
) -> None:
    """A line with its confidence band; about eight markers, whatever the number of points."""
    x = np.asarray(x)
    axes.plot(x, mean, label=label, markevery=max(1, len(x) // 8), **line)
    axes.fill_between(x, low, high, color=line["color"], alpha=0.18, linewidth=0)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Save beside the name and rename; the ending (png, pdf, svg) chooses the format."""
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Shares(Protocol):
    """A policy's name, rounds (P,) and the arms' shares in each, (P, K)."""

    @property
    def policy(self) -> str: ...
    @property
    def rounds(self) -> NDArray[Any]: ...
    @property
    def shares(self) -> NDArray[np.float64]: ...


def plot_shares(curves: Sequence[Shares], arms: Sequence[str]) -> Figure:
    """How each policy shares the rounds among arms as a query goes on; one panel per policy."""
    figure, panels = new_figure(1, len(curves), 1.6 + 3.2 * len(curves), 3.6)
    for c, axes in zip(curves, np.atleast_1d(panels), strict=True):
        bands = axes.stackplot(
            c.rounds,
            c.shares.T,
            labels=list(arms),
            colors=list(islice(cycle(COLOURS), len(arms))),
            alpha=0.75,
            edgecolor="black",
            linewidth=0.4,
        )
        for band, hatch in zip(bands, cycle(HATCHES), strict=False):
            band.set_hatch(hatch)
        axes.set(title=c.policy, xlabel="round of the query", ylim=(0, 1))
        axes.set_xlim(c.rounds[0], max(c.rounds[-1], c.rounds[0] + 1))
        axes.grid(False)
    np.atleast_1d(panels)[0].set_ylabel("share of rounds")
    handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    return figure


def plot_coverage(
    levels: NDArray[np.float64], covered: dict[str, NDArray[np.float64]], n_logs: int
) -> Figure:
    """How often intervals contained the truth, against how often they should have."""
    figure, axes = new_figure(width=5.4, height=4.6)
    half = 1.96 * np.sqrt(levels * (1.0 - levels) / n_logs)
    axes.fill_between(
        levels, levels - half, levels + half, color="#999999", alpha=0.35, linewidth=0,
        label=f"95 % of the noise of {n_logs} logs",
    )  # fmt: skip
    axes.plot(levels, levels, color="#444444", linewidth=0.8)
    for (name, rate), line in zip(covered.items(), line_styles(len(covered)), strict=True):
        axes.plot(levels, rate, label=name, **line)
    axes.set(xlabel="nominal coverage", ylabel="intervals that contain the truth")
    axes.legend()
    return figure


def plot_support(
    arms: Sequence[str], pulls: NDArray[np.int64], propensity: NDArray[np.float64]
) -> Figure:
    """Which arms a log can speak about: rounds, and the range of propensities (2, K)."""
    figure, (left, right) = new_figure(1, 2, 7.6, 1.4 + 0.34 * len(arms))
    y = np.arange(len(arms))
    left.barh(y, pulls, color=COLOURS[0])
    left.set(yticks=y, xlabel="rounds logged")
    left.set_yticklabels(arms)
    right.hlines(y, propensity[0], propensity[1], color=COLOURS[1], linewidth=2.0)
    for end in propensity:
        right.plot(end, y, "|", color=COLOURS[1], markersize=12, markeredgewidth=2.0)
    right.set(yticks=y, yticklabels=[], xlabel="propensity, least to largest", xlim=(-0.02, 1.02))
    for axes in (left, right):
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    return figure
