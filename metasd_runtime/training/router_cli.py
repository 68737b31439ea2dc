"""``metasd train-router``: a classifier that picks the drafter from the prompt.

What is slow to import is imported where it is used, so that ``metasd --help`` stays quick.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from metasd_bandits import checks, read_trace

__all__ = ["train_router_command"]


def train_router_command(
    prompts: Annotated[
        Path,
        typer.Argument(
            help='JSON lines: {"prompt": ..., "drafter": ...}, or {"prompt": ..., "query": ...} '
            "with --trace."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where the router goes (.joblib).")
    ],
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded traces whose queries tell the best drafter; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the learned router, and say how well it does on prompts held out."""
    try:
        texts, drafters = _examples(prompts, trace or [])
        report = _train(texts, drafters, output, seed)
    except (checks.ConfigError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(report))
        return
    console = Console()
    console.print(
        f"{report['prompts']} prompts, {len(report['drafters'])} drafters "
        f"-> {report['output']}\n"
        f"right on held-out prompts: {report['accuracy']:.0%} "
        f"(always the commonest: {report['commonest']:.0%})"
        if report["accuracy"] is not None
        else f"{report['prompts']} prompts -> {report['output']} (too few to hold any out)"
    )


def _examples(path: Path, traces: list[Path]) -> tuple[list[str], list[str]]:
    from metasd_runtime.decoding.learned_router import best_arms

    best = best_arms([read_trace(trace) for trace in traces])
    texts, drafters = [], []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _row(path, number, line)
            drafter = best.get(str(row.get("query"))) if traces else row.get("drafter")
            if drafter is None and traces:
                continue  # this query was not recorded with several drafters
            if not isinstance(drafter, str):
                raise checks.ConfigError(
                    f'{path}:{number} names no "drafter"; add it, or give --trace'
                )
            texts.append(row["prompt"])
            drafters.append(drafter)
    return texts, drafters


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise checks.ConfigError(f'{path}:{number} is no JSON object with a "prompt"')
    return row


def _train(texts: list[str], drafters: list[str], output: Path, seed: int) -> dict[str, Any]:
    import joblib

    from metasd_runtime.decoding.learned_router import train_router

    router = train_router(texts, drafters, seed)
    beside = output.with_name(f".{output.name}.tmp")
    joblib.dump(router, beside)
    os.replace(beside, output)
    counts = Counter(drafters)
    return {
        "output": str(output),
        "prompts": len(texts),
        "drafters": dict(counts),
        "accuracy": _held_out(texts, drafters, min(counts.values()), seed),
        "commonest": max(counts.values()) / len(texts),
    }


def _held_out(texts: list[str], drafters: list[str], fewest: int, seed: int) -> float | None:
    """Share of prompts routed rightly by a router that has not seen them (5 folds, or fewer)."""
    if fewest < 2:
        return None
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    from metasd_runtime.decoding.learned_router import train_router

    folds = StratifiedKFold(min(5, fewest), shuffle=True, random_state=seed)
    model = train_router(texts, drafters, seed)
    predicted = cross_val_predict(model, texts, drafters, cv=folds)
    return float((predicted == drafters).mean())
