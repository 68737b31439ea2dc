"""``python -m metasd_runtime.bench.trees``: do draft trees pay? Trees against chains of one head.

First what a forward costs for as many tokens as chains and trees have; then tokens per round and
tokens/s of a trained pool's heads, each on its own task, drafting chains and trees in turn
(A B C D, A B C D ...). What is printed are ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from metasd_bandits import checks
from metasd_runtime.bench.machine import machine
from metasd_runtime.drafters.eagle.compiled import compile_steps
from metasd_runtime.generation.output import Output
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.compiled import compile_forward
from metasd_runtime.model.load import load_target, log
from metasd_runtime.model.target import Target
from metasd_runtime.prompts import Prompt, chat_tokens, first_of_each, own_prompts, read_prompts

__all__ = ["main"]

# Spec-Bench's names for the tasks that the pool's heads are named after.
_TASKS = {"coding": "code", "math_reasoning": "math", "mathematics": "math"}
_CHAIN, _PLAIN = "chain", "plain"
_REPEATS, _WARM_UP = 12, 2
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class _Run:
    """One kind of draft on one prompt, once."""

    task: str
    kind: str
    seconds: float
    statistics: Statistics


def main(
    target: Annotated[str, typer.Option(help="model name, id or path")] = "smollm2-135m",
    pool: Annotated[str, typer.Option(help="the trained pool")] = "smollm2-135m",
    head: Annotated[
        str | None, typer.Option(help="one head for every task; eagle-TASK if left out")
    ] = None,
    trees: Annotated[
        str, typer.Option(help="comma-separated trees: static, or nodes of a dynamic one")
    ] = "static,12,25",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines; our own five if left out")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="only these tasks of the file")] = None,
    per_task: Annotated[int, typer.Option(help="prompts for each task of the file")] = 3,
    draft_length: Annotated[int, typer.Option(help="N, the depth of the trees")] = 5,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="tokens for each answer")] = 96,
    repeats: Annotated[int, typer.Option(help="turns for each prompt")] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="compile the target")] = False,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu where others use the processor")
    ] = "wall",
) -> None:
    """Compare trees with chains and print ratios."""
    console = Console()
    now = _CLOCKS[checks.choice("clock", clock, _CLOCKS)]
    loaded = load_target(target, dtype=dtype)
    console.print(f"{machine()}\n{loaded.dtype}, pool {pool}, N = {draft_length}, {clock} time")
    spelled = {_CHAIN: f"pool:{pool}", **{_kind(t): f"pool:{pool}?{t}" for t in _trees(trees)}}
    contenders = {
        kind: MetaSD(loaded.model, loaded.tokenizer, drafters=[name], draft_length=draft_length)
        for kind, name in spelled.items()
    }
    sizes = _sizes(contenders, draft_length)
    targets = [contender.target for contender in contenders.values()]
    if compiled:
        features = next(iter(contenders.values())).router.needs_features
        graphs = compile_forward(targets[0], sorted({1, *sizes}), features, log)
        for one in targets:
            one.compiled = graphs
        compile_steps([d for c in contenders.values() for d in c.router.bases], log)
    console.print(_forward_costs(targets[0], sizes, now))
    runs = [
        _run(contender, kind, prompt, head, temperature, max_new_tokens, now)
        for prompt in track(_chosen(prompts, tasks, per_task), "decoding", console=console)
        for _ in range(repeats)
        for kind, contender in contenders.items()
    ]
    console.print(_tokens_per_round(runs, list(contenders)))
    console.print(_speed(runs, list(contenders)))


def _trees(text: str) -> list[str]:
    """How `make_pool` spells each tree."""
    return [
        f"tree=dynamic&nodes={part}" if part.isdecimal() else f"tree={part}"
        for part in text.split(",")
    ]


def _kind(tree: str) -> str:
    return tree.replace("tree=", "").replace("&nodes=", " ")


def _chosen(path: Path | None, tasks: str | None, per_task: int) -> list[Prompt]:
    prompts = own_prompts() if path is None else read_prompts(path)
    if tasks is not None:
        names = {prompt.task for prompt in prompts}
        wanted = [checks.choice("task", task, names) for task in tasks.split(",")]
        prompts = [prompt for prompt in prompts if prompt.task in wanted]
    return first_of_each(prompts, per_task)


def _run(
    metasd: MetaSD,
    kind: str,
    prompt: Prompt,
    head: str | None,
    temperature: float,
    max_new_tokens: int,
    now: Callable[[], float],
) -> _Run:
    assert metasd.tokenizer is not None
    ids = chat_tokens(metasd.tokenizer, prompt.text)
    name = head or f"eagle-{_TASKS.get(prompt.task, prompt.task)}"
    [arm] = [a for a in metasd.router.arms if a.partition(":")[0] == name] or [name]
    sampled: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature:
        sampled["temperature"] = temperature
    begin = now()
    output = metasd.generate(
        ids,
        max_new_tokens=max_new_tokens,
        seed=0,
        pool=[arm],
        policy="fixed",
        return_dict_in_generate=True,
        **sampled,
    )
    assert isinstance(output, Output)
    return _Run(prompt.task, kind, now() - begin, output.statistics)


def _sizes(contenders: dict[str, MetaSD], draft_length: int) -> dict[int, str]:
    """Tokens of a verification, the text's last one included, by the kind of draft."""
    return {
        1 + contender.router.drafters[0].most_tokens(draft_length): kind
        for kind, contender in contenders.items()
    }


def _forward_costs(
    target: Target, sizes: dict[int, str], now: Callable[[], float], text: int = 200
) -> Table:
    """Time of a forward behind a text, over that of a single token; trees read with a mask."""
    target.prefill([1] * text)
    blocks = {1: _PLAIN, **sizes}
    times: dict[int, list[float]] = {n: [] for n in blocks}
    for _ in range(_REPEATS):
        for n, kind in blocks.items():
            parents = [i // 2 - 1 for i in range(n - 1)] if kind not in (_CHAIN, _PLAIN) else None
            begin = now()
            target.forward([1] * n, parents=parents)
            times[n].append(now() - begin)
            target.rollback(n)
    table = Table(title=f"one forward behind {text} tokens, in plain steps")
    for n, kind in blocks.items():
        table.add_column(f"{n}: {kind}", justify="right")
    medians = {n: statistics.median(ts[_WARM_UP:]) for n, ts in times.items()}
    table.add_row(*[f"{medians[n] / medians[1]:.2f}" for n in blocks])
    return table


def _tokens_per_round(runs: list[_Run], kinds: list[str]) -> Table:
    table = Table(title="tokens per round")
    for column in ("task", *kinds):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in dict.fromkeys(run.task for run in runs):
        mine = [_of(runs, task, kind) for kind in kinds]
        table.add_row(task, *[f"{_total(r, 'tokens') / _total(r, 'rounds'):.2f}" for r in mine])
    return table


def _speed(runs: list[_Run], kinds: list[str]) -> Table:
    """Tokens/s over all runs of a task, and milliseconds per round where they come from."""
    table = Table(title="tokens/s as ratios to the chain; (draft + verify) ms per round, wall")
    for column in ("task", *kinds):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in dict.fromkeys(run.task for run in runs):
        row, chain = [task], 0.0
        for kind in kinds:
            mine = _of(runs, task, kind)
            speed = _total(mine, "tokens") / sum(run.seconds for run in mine)
            chain = chain or speed
            parts = (
                1e3 * _total(mine, name) / _total(mine, "rounds")
                for name in ("draft_seconds", "verify_seconds")
            )
            row.append(f"{speed / chain:.2f} ({' + '.join(f'{part:.1f}' for part in parts)})")
        table.add_row(*row)
    return table


def _of(runs: list[_Run], task: str, kind: str) -> list[_Run]:
    return [run for run in runs if (run.task, run.kind) == (task, kind)]


def _total(runs: list[_Run], name: str) -> float:
    return float(sum(getattr(run.statistics, name) for run in runs))


if __name__ == "__main__":
    typer.run(main)
