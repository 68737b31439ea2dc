"""A picture of decoding: which drafter was chosen in which round, and what it earned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from metasd_bandits import Round, TraceHeader
from metasd_bandits.plotting import COLOURS, save_figure, style

__all__ = ["plot_heat_map", "plot_rounds"]

_MARKERS = (
    "o",
    "s",
    "^",
    "D",
    "v",
    "P",
    "X",
    "*",
    "<",
    ">",
    "p",
)  # tells apart what colour repeats


def plot_rounds(header: TraceHeader, rounds: Sequence[Round], path: Path) -> Path:
    """One panel per query: each round a point, its height the reward, its colour the drafter.

    Parameters
    ----------
    header : TraceHeader
    rounds : sequence of Round
        Of one or several queries, in order.
    path : Path
        Where the picture goes; the suffix names its format. Written beside, then renamed.

    Returns
    -------
    Path
        The same path.
    """
    with style():
        save_figure(_draw(header, rounds), path)
    return path


def _draw(header: TraceHeader, rounds: Sequence[Round]) -> Figure:
    queries = list(dict.fromkeys(round_.query for round_ in rounds))
    figure = Figure(figsize=(8, 0.6 + 1.7 * len(queries)), layout="constrained")
    panels = figure.subplots(len(queries), squeeze=False, sharey=True)[:, 0]
    for panel, query in zip(panels, queries, strict=True):
        for arm, name in enumerate(header.arms):
            chosen = [r for r in rounds if r.query == query and r.arm == arm]
            panel.scatter(
                [r.index for r in chosen],
                [r.reward for r in chosen],
                s=18,
                color=COLOURS[arm % len(COLOURS)],
                marker=_MARKERS[arm % len(_MARKERS)],
                label=name if panel is panels[0] else None,
                linewidths=0,
            )
        panel.set_title(query, loc="left", fontsize=9)
        panel.set_ylim(-0.05, 1.05)
        panel.set_ylabel(header.reward, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    panels[-1].set_xlabel("round")
    _add_legend(figure, len(header.arms))
    return figure


def _add_legend(figure: Figure, n: int) -> None:
    """Above the panels, in as many columns as the names leave room for."""
    for columns in range(min(n, 5), 0, -1):
        legend = figure.legend(loc="outside upper center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + 0.25 * (-(-n // columns) - 1))


def plot_heat_map(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    column_label: str,
) -> Figure:
    """Drafters (rows) by task (columns), the number in each cell; each column's best is framed.

    Parameters
    ----------
    values : (rows, columns)
    label : str
        What the numbers are.
    """
    table = np.asarray(values, dtype=float)
    figure = Figure(figsize=(1.2 * len(columns) + 2, 0.6 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(table, cmap="cividis", aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns, rotation=20, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=column_label, ylabel="drafter")
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for j, best in enumerate(table.argmax(axis=0)):
        for i in range(len(rows)):
            axes.text(
                j, i, f"{table[i, j]:.2f}", ha="center", va="center",
                color="white" if table[i, j] < middle else "black",
                fontweight="bold" if i == best else "normal",
            )  # fmt: skip
        frame = Rectangle((j - 0.47, best - 0.47), 0.94, 0.94, fill=False, edgecolor="white", lw=2)
        axes.add_patch(frame)
    figure.colorbar(image, label=label)
    return figure
