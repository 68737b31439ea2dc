"""``metasd train``: from prompts to a pool of drafters in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metasd_bandits import checks

__all__ = ["app", "show_pool", "train"]

app = typer.Typer(add_completion=False)


@app.command()
def train(
    pool: Annotated[
        Path, typer.Argument(help="What to train: a TOML file, see the training page.")
    ],
    out: Annotated[
        Path, typer.Option(help="The pool's folder; an interrupted run goes on.")
    ] = Path("pool"),
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Train one drafter for each domain and one for all, evaluate them, and write the pool.

    Interrupted, the same command continues where it stopped.
    """
    from metasd_runtime.model.load import ModelError, load_target
    from metasd_runtime.training.config import read_config
    from metasd_runtime.training.learn import TrainingError
    from metasd_runtime.training.pipeline import train_pool
    from metasd_runtime.training.report import heat_map, matrix_table, write_matrix

    console = Console(stderr=True)
    try:
        config = read_config(pool)
        loaded = load_target(config.target, dtype=dtype, device=device)
        with _Bars(console) as bars:
            made = train_pool(config, loaded, out, bars.show)
    except (checks.ConfigError, ModelError, TrainingError) as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues from {out / 'work'}")
        raise typer.Exit(130) from None
    Console().print(matrix_table(made.matrix))
    write_matrix(made.matrix, out / "matrix.csv")
    heat_map(made.matrix, out / "matrix.png")
    console.print(f"the pool is in {out}; use it with --pool {out} ({out / 'work'} can go)")


@app.command("pool")
def show_pool(
    pool: Annotated[
        str, typer.Argument(help="A pool's folder, or the name of a target with a ready pool.")
    ] = "smollm2-135m",
    on: Annotated[
        list[str] | None,
        typer.Option(help="TASK=FILE#CATEGORY: evaluate on these prompts (JSON Lines), once each"),
    ] = None,
    prompts: Annotated[int, typer.Option(help="of each task, with --on")] = 20,
    dtype: Annotated[str, typer.Option(help="of the target, with --on")] = "auto",
) -> None:
    """Show a pool: its drafters, and how well each drafts each domain's held-out answers.

    With --on, given once for each task: how well it drafts the target's answers to those prompts.
    """
    from metasd_runtime.drafters.pool import PoolError, read_manifest, ready_pool
    from metasd_runtime.model.load import ModelError
    from metasd_runtime.training.evaluate import Acceptance
    from metasd_runtime.training.report import matrix_table

    console = Console()
    path = ready_pool(pool) or Path(pool)
    try:
        manifest = read_manifest(path)
        if on:
            _show_on(console, path, on, prompts, dtype)
            return
    except (checks.ConfigError, ModelError, PoolError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"a pool for {manifest['target']['name']}, trained on the target's answers to")
    for domain, data in manifest["training"]["data"].items():
        console.print(
            f"  {domain}: {data['texts']} prompts, {data['tokens']} tokens; "
            f"{data['held_out']} prompts held out"
        )
    console.print(
        matrix_table(
            {
                drafter["name"]: {d: Acceptance(**m) for d, m in drafter["metrics"].items()}
                for drafter in manifest["drafters"]
            }
        )
    )


def _show_on(console: Console, path: Path, on: list[str], most: int, dtype: str) -> None:
    from metasd_runtime.drafters.pool import read_manifest
    from metasd_runtime.model.load import load_target
    from metasd_runtime.training.report import matrix_table
    from metasd_runtime.training.transfer import evaluate_on, prompts_of

    texts = prompts_of(on, checks.integer("prompts", most, 1))
    loaded = load_target(read_manifest(path)["target"]["name"], dtype=dtype)
    with _Bars(Console(stderr=True)) as bars:
        matrix = evaluate_on(path, loaded, texts, progress=bars.show)
    console.print(matrix_table(matrix, "greedy answers to these prompts"))


class _Bars:
    """A bar for each step of training, made as the step first reports."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}"),
            console=console,
        )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, step: str, done: int, total: int, remark: str) -> None:
        """Report to a step's bar."""
        if step not in self._tasks:
            self._tasks[step] = self._progress.add_task(step, total=total, remark=remark)
        self._progress.update(self._tasks[step], completed=done, total=total, remark=remark)  # type: ignore[arg-type]
