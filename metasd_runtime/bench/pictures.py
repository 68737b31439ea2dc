"""A benchmark's pictures: readable in print and without colour sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import binomtest

from metasd_bandits import Round
from metasd_bandits.plotting import (
    COLOURS,
    HATCHES,
    line_styles,
    line_with_band,
    new_figure,
    plot_shares,
    save_figure,
    style,
)
from metasd_runtime.bench.results import Results, View, speed_ratio, task_of
from metasd_runtime.bench.run import Line
from metasd_runtime.bench.tables import PARTS, arm_statistics
from metasd_runtime.plot import plot_heat_map

__all__ = ["Picture", "draw_all"]

_PANELS = 3
_LEAST_QUERIES = 3
_LOOKS = {
    "metasd": {"facecolor": COLOURS[0]},
    "single": {"facecolor": COLOURS[5], "hatch": "///"},
    "transformers": {"facecolor": COLOURS[4], "hatch": "..."},
    "peer": {"facecolor": COLOURS[3], "hatch": "xxx"},
}


@dataclass(frozen=True)
class Picture:
    """A saved picture and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True)
class _Shares:
    """How a method shared each round of a query among the arms, as `plot_shares` takes it."""

    policy: str
    rounds: NDArray[np.int64]
    shares: NDArray[np.float64]


def draw_all(results: Results) -> list[Picture]:
    """Draw whatever the results can fill into ``pictures/``."""
    folder = results.folder / "pictures"
    folder.mkdir(exist_ok=True)
    drawn = []
    with style():
        for name, caption, figure in _figures(results):
            path = folder / f"{name}.png"
            save_figure(figure, path)
            drawn.append(Picture(path, caption))
    return drawn


def _figures(results: Results) -> Iterator[tuple[str, str, Figure]]:
    for number, view in enumerate(results.views()):
        end = f"-{number}" if number else ""
        told = f" ({view.name})" if view.name else ""
        if len(view.methods()) > 1:
            yield f"speed{end}", f"Speed-up over plain decoding{told}.", _bars(view)
        if len(view.methods("single")) > 1:
            heat = _heat_map(view)
            yield f"drafters{end}", f"Each drafter alone: speed-up by task{told}.", heat
        if any(line["draft_seconds"] is not None for line in view.of("plain")):
            yield f"time{end}", f"Where the time of a token goes{told}.", _time(view)
        acceptance = _acceptance(results, view)
        if acceptance is not None:
            text = f"Share of accepted tokens at each position of the block{told}."
            yield f"acceptance{end}", text, acceptance
        shares = _all_shares(results, view)
        for part in range(0, len(shares), _PANELS):
            some = shares[part : part + _PANELS]
            arms = _choosing_arms(results, view)
            text = f"How each method shares the rounds of a query among the drafters{told}."
            yield f"shares{end}-{part // _PANELS}", text, plot_shares(some, arms)
        if len(view.methods("single")) > 1 and shares:
            text = f"How often each method chose the task's best single drafter{told}."
            yield f"best-arm{end}", text, _best_arm(results, view)
    if len(results.suite["draft_lengths"]) > 1:
        yield "draft-length", "Speed-up by draft length N, mean over tasks.", _lengths(results)


def _bars(view: View) -> Figure:
    """Methods side by side in each task, with intervals where there are enough prompts."""
    methods = view.methods()[1:]
    tasks = view.tasks
    columns = 1 if len(methods) * len(tasks) > 24 else len(tasks)
    rows = -(-len(tasks) // columns)
    figure, panels = new_figure(
        rows,
        columns,
        6.8 if columns == 1 else 2.2 * columns + 1.6,
        rows * (0.7 + 0.2 * len(methods)),
    )
    panels = np.atleast_1d(panels).ravel()
    for axes in panels[1:]:
        axes.sharex(panels[0])
    y = np.arange(len(methods))
    for axes, task in zip(panels, tasks, strict=True):
        ratios = [speed_ratio(view.of(m, task), view.of("plain", task)) for m in methods]
        value = np.array([r.value for r in ratios])
        spread = np.array([[r.value - r.low, r.high - r.value] for r in ratios]).T
        for bar, method in zip(axes.barh(y, value, ec="black", lw=0.4), methods, strict=True):
            bar.set(**_LOOKS[view.of(method)[0]["kind"]])
        axes.errorbar(value, y, xerr=spread, fmt="none", ecolor="black", capsize=2)
        axes.axvline(1.0, color="#444444", linewidth=0.8)
        axes.set(title=task, ylim=(len(methods) - 0.5, -0.5))
        first = axes.get_subplotspec().is_first_col()
        axes.set_yticks(y, methods if first else [""] * len(methods), fontsize=8)
        axes.grid(axis="y", visible=False)
    figure.supxlabel(
        "tokens/s, as a ratio to plain decoding\n"
        "(hatched: one drafter alone; dotted: transformers; crossed: other packages)",
        fontsize=8,
    )
    return figure


def _heat_map(view: View) -> Figure:
    singles = view.methods("single")
    values = [
        [speed_ratio(view.of(s, task), view.of("plain", task)).value for task in view.tasks]
        for s in singles
    ]
    return plot_heat_map(values, singles, view.tasks, "speed-up over plain decoding", "task")


def _time(view: View) -> Figure:
    methods = view.methods("plain", "single", "metasd")
    figure, axes = new_figure(width=6.8, height=1.4 + 0.28 * len(methods))
    left = np.zeros(len(methods))
    tokens = np.array([sum(x["tokens"] for x in view.of(m)) for m in methods])
    for i, part in enumerate(PARTS):
        seconds = np.array([sum(x[f"{part}_seconds"] for x in view.of(m)) for m in methods])
        width = 1e3 * seconds / tokens
        axes.barh(
            np.arange(len(methods)), width, left=left, color=COLOURS[i], hatch=HATCHES[i],
            label="other" if part == "overhead" else part, edgecolor="black", linewidth=0.4,
        )  # fmt: skip
        left += width
    axes.set_yticks(np.arange(len(methods)), methods, fontsize=8)
    axes.set(xlabel="milliseconds per emitted token", ylim=(len(methods) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=len(PARTS), fontsize=8)
    return figure


def _acceptance(results: Results, view: View) -> Figure | None:
    arms = {n: s for n, s in arm_statistics(results, view.lines).items() if s.drafted}
    if not arms:
        return None
    figure, axes = new_figure(width=6.8)
    for (name, s), line in zip(arms.items(), line_styles(len(arms)), strict=True):
        axes.plot(np.arange(1, len(s.acceptance_at) + 1), s.acceptance_at, label=name, **line)
    axes.set(xlabel="position in the block", ylim=(0, 1))
    axes.set_ylabel("accepted, among rounds that came that far")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _choosing(results: Results, view: View) -> dict[str, list[Line]]:
    """The methods that chose among several drafters in this view, with their lines."""
    chosen = {}
    for method in view.methods("metasd"):
        lines = view.of(method)
        arms = {name for name, _ in results.rounds(lines)}
        if len(arms) > 1:
            chosen[method] = lines
    return chosen


def _choosing_arms(results: Results, view: View) -> list[str]:
    """Drafters that any of these methods used, in the pool's order."""
    lines = [line for some in _choosing(results, view).values() for line in some]
    used = {name for name, _ in results.rounds(lines)}
    pools = [results.traces[line["slug"]].header.arms for line in lines]
    return [arm for arm in dict.fromkeys(arm for pool in pools for arm in pool) if arm in used]


def _all_shares(results: Results, view: View) -> list[_Shares]:
    arms = _choosing_arms(results, view)
    made = []
    for method, lines in _choosing(results, view).items():
        rounds = list(results.rounds(lines))
        longest = _longest([round_ for _, round_ in rounds])
        counts = np.zeros((longest, len(arms)))
        for name, round_ in rounds:
            if round_.index < longest:
                counts[round_.index, arms.index(name)] += 1
        shares = counts / counts.sum(axis=1, keepdims=True)
        made.append(_Shares(method, np.arange(1, longest + 1), shares))
    return made


def _longest(rounds: Sequence[Round]) -> int:
    """Rounds of a query that enough queries came to; later ones would show single queries."""
    last: dict[str, int] = {}
    for round_ in rounds:
        last[round_.query] = max(last.get(round_.query, 0), round_.index + 1)
    lengths = sorted(last.values(), reverse=True)
    return lengths[min(_LEAST_QUERIES, len(lengths)) - 1]


def _best_arm(results: Results, view: View) -> Figure:
    """Figure 3 of the paper: share of queries that use the best drafter in their i-th round."""
    figure, axes = new_figure(width=6.8)
    best = {task: view.best_single(task) for task in view.tasks}
    choosing = _choosing(results, view)
    for (method, lines), look in zip(choosing.items(), line_styles(len(choosing)), strict=True):
        rounds = list(results.rounds(lines))
        longest = _longest([round_ for _, round_ in rounds])
        hits, seen = np.zeros(longest), np.zeros(longest)
        for name, round_ in rounds:
            if round_.index < longest:
                seen[round_.index] += 1
                hits[round_.index] += name == best[task_of(round_)]
        bands = [
            binomtest(int(k), int(n)).proportion_ci(method="wilson")
            for k, n in zip(hits, seen, strict=True)
        ]
        low, high = np.array(bands).T
        line_with_band(axes, np.arange(1, longest + 1), hits / seen, low, high, method, look)
    axes.set(xlabel="round of the query", ylabel="best drafter chosen", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _lengths(results: Results) -> Figure:
    """Figure 2 of the paper: how speed depends on the draft length."""
    views = [v for v in results.views() if v[1:3] == results.views()[0][1:3]]
    methods = views[0].methods("single", "metasd")
    figure, axes = new_figure(width=6.8)
    x = [view.draft_length for view in views]
    for method, look in zip(methods, line_styles(len(methods)), strict=True):
        ratios = [speed_ratio(view.of(method), view.of("plain")) for view in views]
        low = [r.value if np.isnan(r.low) else r.low for r in ratios]
        high = [r.value if np.isnan(r.high) else r.high for r in ratios]
        line_with_band(axes, x, [r.value for r in ratios], low, high, method, look)
    axes.set(xlabel="draft length N", ylabel="speed-up over plain decoding")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure
