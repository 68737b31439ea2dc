"""``make bench-decode``: MetaSD against plain decoding, our own and transformers', in one run.

Contenders take turns prompt by prompt (A B C D, A B C D ...), so that drift hits all alike; what is
printed are ratios of medians over repeats, tokens counted the same way for everybody.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from metasd_bandits import make_policy
from metasd_runtime.metasd import MetaSD, Output
from metasd_runtime.prompts import Prompt, chat_tokens, own_prompts, read_prompts
from metasd_runtime.statistics import Statistics

__all__ = ["main"]


@dataclass(frozen=True)
class _Run:
    """One contender on one prompt, once."""

    task: str
    contender: str
    tokens: int
    seconds: float
    statistics: Statistics | None = None


def machine() -> str:
    """The machine in a line: processor, cores, threads, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def main(
    target: Annotated[str, typer.Option(help="model name, id or path")] = "smollm2-135m",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines; our own five if left out")
    ] = None,
    per_task: Annotated[int, typer.Option(help="prompts for each task of the file")] = 3,
    drafters: Annotated[
        str, typer.Option(help="the pool")
    ] = "pool:smollm2-135m,prompt-lookup,none",
    policy: Annotated[str, typer.Option(help="the policy")] = "ucb",
    draft_length: Annotated[int, typer.Option(help="N")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="tokens for each answer")] = 128,
    repeats: Annotated[int, typer.Option(help="turns for each prompt")] = 3,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16")] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="compile the target, for plain decoding as well")
    ] = False,
) -> None:
    """Time the contenders side by side and print ratios."""
    console = Console()
    pool = drafters.split(",")
    meta = MetaSD.from_pretrained(
        target,
        dtype=dtype,
        drafters=pool,
        policy=policy,
        draft_length=draft_length,
        compiled=compiled,
    )
    plain = MetaSD(meta.target.model, meta.tokenizer, drafters=["none"])
    plain.target.compiled = meta.target.compiled
    chosen = own_prompts() if prompts is None else first_of_each(read_prompts(prompts), per_task)
    contenders: dict[str, Callable[[list[int]], tuple[int, float, Statistics | None]]] = {
        "plain, our loop": lambda ids: _ours(plain, ids, max_new_tokens),
        "MetaSD": lambda ids: _ours(meta, ids, max_new_tokens),
        "transformers generate": lambda ids: _theirs(meta, ids, max_new_tokens),
        "transformers prompt lookup": lambda ids: _theirs(
            meta, ids, max_new_tokens, prompt_lookup_num_tokens=draft_length
        ),
    }
    console.print(f"{machine()}\n{meta.target.model.dtype}, pool {drafters}, policy {policy}")
    for contender in contenders.values():
        contender(_ids(meta, "Say hello."))  # warm up
    runs = [
        _Run(prompt.task, name, *contender(_ids(meta, prompt.text)))
        for prompt in track(chosen, "decoding", console=console)
        for _ in range(repeats)
        for name, contender in contenders.items()
    ]
    console.print(_ratios(runs, list(contenders)))
    console.print(_breakdown(runs))
    console.print(_bandit_latency(5, policy))


def first_of_each(prompts: list[Prompt], n: int) -> list[Prompt]:
    kept: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kept.setdefault(prompt.task, []).append(prompt)
    return [prompt for some in kept.values() for prompt in some[:n]]


def _ids(metasd: MetaSD, text: str) -> list[int]:
    assert metasd.tokenizer is not None
    return chat_tokens(metasd.tokenizer, text)


def _ours(metasd: MetaSD, ids: list[int], n: int) -> tuple[int, float, Statistics | None]:
    begin = time.perf_counter()
    output = metasd.generate(
        ids, max_new_tokens=n, do_sample=False, seed=0, return_dict_in_generate=True
    )
    assert isinstance(output, Output)
    return len(output.new_tokens), time.perf_counter() - begin, output.statistics


def _theirs(
    metasd: MetaSD, ids: list[int], n: int, **settings: Any
) -> tuple[int, float, Statistics | None]:
    tensor = torch.tensor([ids], device=metasd.target.device)
    model: Any = metasd.target.model
    begin = time.perf_counter()
    output = model.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=metasd.tokenizer.pad_token_id if metasd.tokenizer else None,
        **settings,
    )
    return output.shape[1] - len(ids), time.perf_counter() - begin, None


def _ratios(runs: list[_Run], contenders: list[str]) -> Table:
    """Median tokens/s of each contender by task, as ratios to plain decoding in our loop."""
    table = Table(title="tokens/s, as ratios to plain decoding in our own loop")
    table.add_column("task")
    table.add_column("plain tok/s", justify="right")
    for name in contenders[1:]:
        table.add_column(name, justify="right")
    table.add_column("MetaSD / transformers", justify="right")
    columns: list[list[float]] = []
    for task in dict.fromkeys(run.task for run in runs):
        speed = {
            name: statistics.median(
                r.tokens / r.seconds for r in runs if (r.task, r.contender) == (task, name)
            )
            for name in contenders
        }
        base = speed[contenders[0]]
        row = [speed[name] / base for name in contenders[1:]]
        row.append(speed["MetaSD"] / speed["transformers generate"])
        columns.append(row)
        table.add_row(task, f"{base:.1f}", *[f"{x:.2f}" for x in row])
    table.add_section()
    means = [statistics.mean(column) for column in zip(*columns, strict=True)]
    table.add_row("mean", "", *[f"{x:.2f}" for x in means])
    return table


def _breakdown(runs: list[_Run]) -> Table:
    """Milliseconds per round: where MetaSD's time goes."""
    table = Table(title="MetaSD, milliseconds per round")
    table.add_column("task")
    parts = ("draft", "switch", "verify", "bandit", "everything else")
    for part in parts:
        table.add_column(part, justify="right")
    table.add_column("bandit + rest, % of a round", justify="right")
    for task in dict.fromkeys(run.task for run in runs):
        mine = [r.statistics for r in runs if r.task == task and r.contender == "MetaSD"]
        per_round = [
            statistics.median(1e3 * getattr(s, name) / s.rounds for s in mine if s is not None)
            for name in (
                "draft_seconds",
                "switch_seconds",
                "verify_seconds",
                "bandit_seconds",
                "overhead_seconds",
            )
        ]
        share = 100 * (per_round[3] + per_round[4]) / sum(per_round)
        table.add_row(task, *[f"{x:.3f}" for x in per_round], f"{share:.2f}")
    return table


def _bandit_latency(n_arms: int, policy: str, turns: int = 100_000) -> str:
    """Microseconds of one select and one update, called as the router calls them."""
    bandit = make_policy(policy)
    bandit.reset(n_arms, seed=0)
    rewards = [0.2 + 0.6 * arm / n_arms for arm in range(n_arms)]
    bandit.update(bandit.select(), 0.5)
    begin = time.perf_counter()
    for _ in range(turns):
        arm = bandit.select()
        bandit.update(arm, rewards[arm])
    micro = 1e6 * (time.perf_counter() - begin) / turns
    return f"select + update: {micro:.2f} microseconds at {n_arms} arms ({bandit!r})"


if __name__ == "__main__":
    typer.run(main)
