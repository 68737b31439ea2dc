"""``metasd bench`` and ``metasd report``.

What is slow to import is imported where it is used, so that ``metasd --help`` stays quick.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from metasd_bandits import ConfigError

if TYPE_CHECKING:
    from metasd_runtime.bench.results import Results

__all__ = ["bench", "report"]


def bench(
    suite: Annotated[
        str | None, typer.Argument(help="a shipped suite's name, or a TOML file of your own")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="the suite 'quick': our own prompts, a few minutes")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="list the shipped suites")] = False,
    data: Annotated[Path | None, typer.Option(help="folder of the suite's prompt files")] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder for the results; out/bench/SUITE if left out")
    ] = None,
    target: Annotated[str | None, typer.Option(help="instead of the suite's")] = None,
    dtype: Annotated[str | None, typer.Option(help="instead of the suite's")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; chosen if left out")] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compiled/--eager", help="compile the target; instead of the suite's"),
    ] = None,
    prompts_per_task: Annotated[int | None, typer.Option(help="instead of the suite's")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="instead of the suite's")] = None,
    peers: Annotated[
        str | None, typer.Option(help="a Python that has economize and flashspec; they take part")
    ] = None,
) -> None:
    """Run SUITE and write tables, pictures and a page; a run that was stopped goes on."""
    from metasd_runtime.bench.methods import contenders
    from metasd_runtime.bench.peers import Peers
    from metasd_runtime.bench.results import read_results
    from metasd_runtime.bench.run import run
    from metasd_runtime.bench.suite import find_suite, read_suite
    from metasd_runtime.bench.tasks import load_items
    from metasd_runtime.model.load import load_target

    if show:
        _list_suites()
        return
    if quick == (suite is not None):
        raise ConfigError("name one suite, or give --quick; --list shows those that are shipped")
    path = find_suite(suite or "quick")
    chosen = read_suite(
        path,
        target=target,
        dtype=dtype,
        compiled=compiled,
        prompts_per_task=prompts_per_task,
        max_new_tokens=max_new_tokens,
    )
    folders = [path.parent, *([data] if data else [])]
    items = load_items(chosen, folders)
    loaded = load_target(chosen.target, dtype=chosen.dtype, device=device)
    folder = output or Path("out/bench") / chosen.name
    try:
        with ExitStack() as stack:
            process = None if peers is None else stack.enter_context(Peers(peers, loaded))
            bar = stack.enter_context(_bar())
            task = bar.add_task("", total=None, what="warming up")
            everybody = contenders(chosen, loaded, folders, process)
            run(
                chosen, loaded, items, everybody, folder,
                lambda step: bar.update(
                    task, completed=step.done, total=step.total, what=f"{step.task}, {step.method}"
                ),
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from {folder}", err=True)
        raise typer.Exit(130) from None
    _report(read_results(folder))


def report(
    results: Annotated[Path, typer.Argument(help="the folder that metasd bench wrote")],
) -> None:
    """Draw the tables, pictures and the page of RESULTS again, without decoding."""
    from metasd_runtime.bench.results import read_results

    _report(read_results(results))


def _report(results: Results) -> None:
    from metasd_runtime.bench.page import write_report

    page, tables = write_report(results)
    console = Console()
    for table in tables[:2]:
        console.print(table.rich())
    console.print(f"all tables: {page.parent / 'tables.md'}\npage: {page}", soft_wrap=True)
    if wrong := results.unequal():
        console.print(
            f"[bold red]{len(wrong)} greedy answers in float32 differ from plain decoding[/], "
            f"first {wrong[0]['method']} on {wrong[0]['prompt']}: this is a fault, please report it"
        )
        raise typer.Exit(1)


def _list_suites() -> None:
    from metasd_runtime.bench.suite import read_suite, shipped_suites

    for name, path in shipped_suites().items():
        typer.echo(f"{name:<16} {read_suite(path).title}")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.fields[what]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
