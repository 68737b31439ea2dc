"""The command line: ``metasd generate | demo | models | train | pool | bench | report ...``."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from metasd_bandits import ConfigError
from metasd_bandits.traces.jsonl import TraceError
from metasd_runtime.bench.cli import bench, report
from metasd_runtime.drafters.pool import PoolError
from metasd_runtime.model.cli import app as models_app
from metasd_runtime.model.store import ModelError
from metasd_runtime.training.cli import show_pool, train
from metasd_runtime.training.router_cli import train_router_command

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Speculative decoding in which a bandit learns, round by round, which drafter to use.",
)
app.add_typer(models_app, name="models")
app.command("train")(train)
app.command("pool")(show_pool)
app.command("train-router")(train_router_command)
app.command("bench")(bench)
app.command("report")(report)

DTYPE = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; chosen if left out")]
COMPILED = Annotated[
    bool, typer.Option("--compiled", help="compile the target: minutes once, then faster")
]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; chosen if left out")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to answer")],
    target: Annotated[str, typer.Option(help="model name, Hugging Face id or path")] = (
        "smollm2-135m"
    ),
    policy: Annotated[
        str, typer.Option(help="auto: all drafters in one block; or a bandit, as in ucb:beta=0.5")
    ] = "auto",
    drafters: Annotated[str, typer.Option(help="comma-separated pool of drafters")] = (
        "prompt-lookup,suffix,early-exit,none"
    ),
    pool: Annotated[
        str | None, typer.Option(help="a trained pool: its folder, or a target's name; joins in")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(help="the pool drafts trees: static, or dynamic; else chains")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="most nodes of a dynamic tree (12)")] = None,
    first: Annotated[
        str | None, typer.Option(help="a drafter that is asked before each of the pool's")
    ] = None,
    reward: Annotated[str, typer.Option(help="throughput, bd or be")] = "throughput",
    draft_length: Annotated[
        str, typer.Option(help="most tokens drafted in a round; 2,4,8 lets the bandit choose")
    ] = "5",
    draft_threshold: Annotated[
        float, typer.Option(help="stop drafting where the drafter's confidence falls below this")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="most tokens to emit")] = 256,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="sample among the k likeliest tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="sample within this nucleus")] = None,
    min_p: Annotated[float | None, typer.Option(help="drop tokens below this share")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="above 1 discourages")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="of the sampling and of the policy")] = 0,
    raw: Annotated[bool, typer.Option(help="no chat template around the prompt")] = False,
    trace: Annotated[Path | None, typer.Option(help="append the rounds to this file")] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="let every arm draft, one is used: a full trace; slow")
    ] = False,
    draft_all: Annotated[
        bool, typer.Option("--draft-all", help="no bandit: all draft, the longest is used; slow")
    ] = False,
    compiled: COMPILED = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.html]",
            help="show who proposed each token, with which chance; with a file, as a page",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    dtype: DTYPE = None,
    device: DEVICE = None,
) -> None:
    """Answer PROMPT: streams the text, then the statistics."""
    from transformers import TextStreamer

    from metasd_runtime.metasd import Interrupted, MetaSD, Output
    from metasd_runtime.prompts import chat_tokens

    metasd = MetaSD.from_pretrained(
        target,
        dtype=dtype,
        device=device,
        drafters=[
            *_pool(pool, {"tree": tree, "nodes": nodes, "first": first}),
            *[name.strip() for name in drafters.split(",") if name.strip()],
        ],
        policy=policy,
        reward=reward,
        draft_length=_lengths(draft_length),
        draft_threshold=draft_threshold,
        shadow=shadow,
        draft_all=draft_all,
        compiled=compiled,
    )
    tokenizer = metasd.tokenizer
    assert tokenizer is not None
    settings = {
        "max_new_tokens": max_new_tokens,
        "repetition_penalty": repetition_penalty,
        "stop_strings": stop or None,
        **_sampling(temperature, {"top_k": top_k, "top_p": top_p, "min_p": min_p}),
    }
    streamer = (
        None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    interrupted = False
    try:
        output = metasd.generate(
            chat_tokens(tokenizer, prompt, raw),
            return_dict_in_generate=True,
            streamer=streamer,
            seed=seed,
            trace=trace,
            **{name: value for name, value in settings.items() if value is not None},
        )
    except Interrupted as stopped:
        output, interrupted = stopped.output, True
    assert isinstance(output, Output)
    text = str(tokenizer.decode(output.new_tokens, skip_special_tokens=True))
    if as_json:
        typer.echo(json.dumps(_as_dict(output, text)))
    else:
        _show(output)
    if explain is not None:
        _explain(output, tokenizer, explain)
    if interrupted:
        raise typer.Exit(130)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the trace and the picture")] = Path(
        "out/demo"
    ),
    max_new_tokens: Annotated[int, typer.Option(help="most tokens for each answer")] = 160,
    dtype: DTYPE = None,
    device: DEVICE = None,
    compiled: COMPILED = False,
) -> None:
    """Decode five prompts, plainly and with MetaSD-UCB, and compare."""
    from metasd_runtime.bench.demo import run

    run(out, max_new_tokens, dtype, device, compiled)


def _pool(pool: str | None, options: Mapping[str, Any]) -> list[str]:
    """The trained pool as it is spelled among the drafters."""
    given = "&".join(f"{name}={value}" for name, value in options.items() if value is not None)
    if pool is None:
        if given:
            raise ConfigError(f"{given} says how a trained pool drafts; add --pool NAME")
        return []
    return [f"pool:{pool}?{given}"]


def _lengths(text: str) -> int | list[int]:
    """One draft length, or several to choose from."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"draft_length={text!r} is no whole number; give one, or several as in 2,4,8"
        ) from None
    return lengths[0] if len(lengths) == 1 else lengths


def _sampling(temperature: float, filters: dict[str, Any]) -> dict[str, Any]:
    """Greedy settings at temperature 0, where the filters say nothing."""
    if temperature < 0:
        raise ConfigError(f"temperature={temperature!r} is negative; give 0 for greedy, or more")
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, **filters}


def _as_dict(output: Any, text: str) -> dict[str, Any]:
    from dataclasses import asdict

    statistics = output.statistics.as_dict()
    return {
        "text": text,
        "tokens": output.new_tokens,
        "finish": str(output.finish),
        "arms": statistics.pop("arms"),
        "rounds": statistics["rounds"],
        "seconds": statistics["seconds"],
        "target_forwards": statistics["target_forwards"],
        "statistics": statistics,
        "trace": [asdict(round_) for round_ in output.trace],
    }


def _show(output: Any) -> None:
    from metasd_runtime.report import arm_table, summary_line

    console = Console()
    console.print(arm_table(output.statistics))
    console.print(f"{summary_line(output.statistics)}; finished by {output.finish}")


def _explain(output: Any, tokenizer: Any, where: str) -> None:
    """Who proposed what: in the terminal, or as a page."""
    from metasd_runtime.explain import as_html, as_text, pieces

    told = pieces(output.trace, output.new_tokens, tokenizer.decode)
    if where == "-":
        Console().print(as_text(told))
    else:
        Path(where).write_text(as_html(told), encoding="utf-8")
        typer.echo(f"who proposed what: {where}", err=True)


def main() -> None:
    """Entry point: errors a user can mend are one sentence, not a traceback."""
    warnings.showwarning = _warn
    try:
        app(_with_value(sys.argv[1:]), standalone_mode=True)
    except (ConfigError, TraceError, ModelError, PoolError, OSError) as error:
        typer.echo(f"metasd: {error}", err=True)
        sys.exit(2)


def _with_value(arguments: list[str]) -> list[str]:
    """The arguments, with the terminal behind an ``--explain`` that names no page."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return [
        "--explain=-" if one == "--explain" and not following.endswith((".html", ".htm")) else one
        for one, following in pairs
    ]


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, RuntimeWarning):
        typer.echo(f"metasd: {message}", err=True)


if __name__ == "__main__":
    main()
