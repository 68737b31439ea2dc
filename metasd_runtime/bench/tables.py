"""A benchmark's tables, once for Markdown, the page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import rich.markup
import rich.table

from metasd_bandits import Round
from metasd_runtime.bench.results import Results, View, speed_ratio
from metasd_runtime.bench.run import Line
from metasd_runtime.generation.statistics import ArmStatistics

__all__ = ["PARTS", "Table", "arm_statistics", "tables"]

PARTS = ("prefill", "draft", "verify", "switch", "bandit", "overhead")


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of cells, and a sentence on how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown; the first column is text, the others are flush right."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"**{self.title}**\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def rich(self) -> rich.table.Table:
        """For the terminal."""
        table = rich.table.Table(title=self.title, caption=self.note or None, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(
                column, justify="right" if i else "left", no_wrap=not i, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*[rich.markup.escape(cell) for cell in row])
        return table


def tables(results: Results) -> list[Table]:
    """All that the results can fill, the speed-ups first."""
    made: list[Table | None] = []
    for view in results.views():
        made += [
            _speed_ups(view),
            _halves(view) if results.suite.get("halves") else None,
            _against_hindsight(view),
            _against_generate(view),
            _tokens_per_round(view),
            _times(view),
            _agreement(view, results.header["dtype"]),
            _drafters(results, view),
            _positions(results, view),
            _shares(results, view),
        ]
    return [table for table in made if table is not None and table.rows]


def arm_statistics(results: Results, lines: Sequence[Line]) -> dict[str, ArmStatistics]:
    """Each drafter's statistics over the rounds behind these lines."""
    by_name: dict[str, list[Round]] = {}
    for name, round_ in results.rounds(lines):
        by_name.setdefault(name, []).append(round_)
    return {name: ArmStatistics.of(name, rounds) for name, rounds in by_name.items()}


def _title(text: str, view: View) -> str:
    return f"{text} ({view.name})" if view.name else text


def _by_task(
    view: View, methods: Sequence[str], cell: Callable[[str, str | None], str]
) -> list[list[str]]:
    """A row for each method: a cell for each task, and one for all (None)."""
    places = [*view.tasks, *([None] if len(view.tasks) > 1 else [])]
    return [[method, *[cell(method, task) for task in places]] for method in methods]


def _task_columns(view: View) -> list[str]:
    return ["method", *view.tasks, *(["mean"] if len(view.tasks) > 1 else [])]


def _speed_ups(view: View) -> Table:
    def speed(method: str, task: str | None) -> str:
        if method == "plain":
            lines = view.of(method, task)
            return f"{sum(x['tokens'] for x in lines) / sum(x['seconds'] for x in lines):.1f}"
        return str(speed_ratio(view.of(method, task), view.of("plain", task)))

    rows = _by_task(view, view.methods(), speed)
    rows[0][0] = "plain, tokens/s"
    if len(view.methods("single")) > 1:
        rows.append(["best single, in hindsight", *_hindsight(view)])
    n = len({line["prompt"] for line in view.lines})
    return Table(
        _title("Speed-up over plain decoding", view),
        _task_columns(view),
        rows,
        f"Tokens per second as ratios to plain decoding in our own loop; {n} prompts in all; "
        "95 % bootstrap intervals over prompts where a cell has ten or more.",
    )


def _halves(view: View) -> Table:
    """Speeds over the first and over the second half of each task's prompts, tasks' mean."""
    numbers = {line["prompt"]: int(line["prompt"].rpartition("/")[2]) for line in view.lines}
    middle = (max(numbers.values()) + 1) / 2

    def cell(method: str, second: bool) -> str:
        mine, plain = (
            [x for x in view.of(name) if (numbers[x["prompt"]] >= middle) == second]
            for name in (method, "plain")
        )
        return str(speed_ratio(mine, plain))

    rows = [[m, cell(m, False), cell(m, True)] for m in view.methods() if m != "plain"]
    return Table(
        _title("Speed-up over plain decoding, by halves of the prompts", view),
        ["method", "first half", "second half"],
        rows,
    )


def _hindsight(view: View) -> list[str]:
    best = {task: view.best_single(task) for task in view.tasks}
    cells = [
        f"{speed_ratio(view.of(name or '', task), view.of('plain', task)).value:.2f} ({name})"
        for task, name in best.items()
    ]
    if len(best) > 1:
        cells.append(str(speed_ratio(view.hindsight(), view.of("plain"))))
    return cells


def _against(view: View, title: str, base: Sequence[Line], methods: Sequence[str]) -> Table:
    def cell(method: str, task: str | None) -> str:
        theirs = [line for line in base if task in (None, line["task"])]
        return str(speed_ratio(view.of(method, task), theirs))

    return Table(_title(title, view), _task_columns(view), _by_task(view, methods, cell))


def _against_hindsight(view: View) -> Table | None:
    if len(view.methods("single")) < 2:
        return None
    return _against(
        view,
        "Speed against the best single drafter, known in hindsight for each task",
        view.hindsight(),
        view.methods("metasd"),
    )


def _against_generate(view: View) -> Table | None:
    """Against the first of the library's methods, which is plain where a suite has one."""
    theirs = view.methods("transformers")
    if not theirs:
        return None
    others = [m for m in view.methods() if m != theirs[0]]
    return _against(view, f"Speed against {theirs[0]}", view.of(theirs[0]), others)


def _tokens_per_round(view: View) -> Table:
    def cell(method: str, task: str | None) -> str:
        lines = view.of(method, task)
        rounds = sum(line["rounds"] for line in lines)
        return f"{sum(line['tokens'] for line in lines) / rounds:.2f}" if rounds else "-"

    methods = view.methods("single", "metasd")
    return Table(
        _title("Tokens per round", view), _task_columns(view), _by_task(view, methods, cell)
    )


def _times(view: View) -> Table:
    rows = []
    for method in view.methods("plain", "single", "metasd"):
        lines = [line for line in view.of(method) if line["draft_seconds"] is not None]
        if not lines:
            continue
        tokens = sum(line["tokens"] for line in lines)
        parts = [sum(line[f"{p}_seconds"] for line in lines) for p in PARTS]
        outside = 100.0 * (parts[-1] + parts[-2]) / (sum(parts) - parts[0])
        rows.append([method, *[f"{1e3 * s / tokens:.3f}" for s in parts], f"{outside:.2f}"])
    return Table(
        _title("Where the time goes, milliseconds per emitted token", view),
        ["method", *PARTS[:-1], "other", "bandit + other, % of decoding"],
        rows,
    )


def _agreement(view: View, dtype: str) -> Table | None:
    if view.temperature > 0:
        return None
    rows = []
    for method in view.methods("single", "metasd", "transformers", "peer"):
        lines = view.of(method)
        other = [line for line in lines if line["difference"] is not None]
        gap = f"{max(line['gap'] for line in other):.3g}" if other else "-"
        rows.append([method, f"{len(lines) - len(other)} of {len(lines)}", gap])
    return Table(
        _title(f"Greedy answers equal to plain decoding's ({dtype})", view),
        ["method", "equal", "largest top-2 gap where one differs"],
        rows,
        "In float32 every answer of ours must be equal, unless the target is compiled. In half "
        "precision a block's forward and a "
        "single token's round differently: where two answers part, the gap between the target's "
        "two largest logits tells whether it was a tie.",
    )


def _drafters(results: Results, view: View) -> Table:
    """Each drafter on each task, from all rounds in which it drafted."""
    by_task = {
        task: arm_statistics(results, [x for x in view.lines if x["task"] == task])
        for task in view.tasks
    }
    arms = list(dict.fromkeys(arm for some in by_task.values() for arm in some))

    def cell(task: str, arm: str) -> str:
        s = by_task[task].get(arm)
        return "-" if s is None else f"{s.tokens_per_round:.2f} ({s.block_divergence:.2f})"

    return Table(
        _title("Drafters by task: tokens per round (mean block divergence reward)", view),
        ["drafter", *view.tasks],
        [[arm, *[cell(task, arm) for task in view.tasks]] for arm in arms if arm != "none"],
        "Over all rounds, whoever chose the drafter.",
    )


def _positions(results: Results, view: View) -> Table:
    arms = arm_statistics(results, view.lines)
    longest = max((len(s.acceptance_at) for s in arms.values()), default=0)
    rows = [
        [
            name,
            *[f"{rate:.2f}" for rate in s.acceptance_at],
            *["-"] * (longest - len(s.accepted_at)),
        ]
        for name, s in arms.items()
        if name != "none"
    ]
    return Table(
        _title("Acceptance by position in the block, among rounds that came that far", view),
        ["drafter", *[str(j + 1) for j in range(longest)]],
        rows,
    )


def _shares(results: Results, view: View) -> Table:
    """Which drafters each method chose, over all tasks."""
    methods = view.methods("metasd")
    stats = {method: arm_statistics(results, view.of(method)) for method in methods}
    arms = list(dict.fromkeys(arm for some in stats.values() for arm in some))
    rows = []
    for method, some in stats.items():
        total = sum(s.pulls for s in some.values())
        shares = [some[arm].pulls / total if arm in some else 0.0 for arm in arms]
        if total:
            rows.append([method, *[f"{100 * share:.0f}" for share in shares]])
    return Table(_title("Shares of rounds, %", view), ["method", *arms], rows)
