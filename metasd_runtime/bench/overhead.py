"""``python -m metasd_runtime.bench.overhead``: what a round costs outside the models' forwards.

The bandit and all bookkeeping, per round and as a share of decoding, by the length of the text and
by the number of drafters; every cell decodes in turn (A B C, A B C ...), medians are printed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from metasd_bandits import checks
from metasd_runtime.bench.machine import machine
from metasd_runtime.generation.output import Output
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.load import load_target
from metasd_runtime.model.target import Target
from metasd_runtime.prompts import chat_tokens, own_prompts

__all__ = ["main"]

# Heads first, then drafters that cost little themselves but are told of every round.
_DRAFTERS = (
    "pool:smollm2-135m",
    "prompt-lookup",
    "suffix",
    *(f"prompt-lookup:{n}" for n in (1, 2, 4, 5, 6, 7)),
    "prompt-lookup:3:2",
    "none",
)
_WARM_UP = 8


class _Cost(NamedTuple):
    """Of one answer: milliseconds a round outside forwards, and percent of decoding."""

    milliseconds: float
    share: float


def main(
    target: Annotated[str, typer.Option(help="model name, id or path")] = "smollm2-135m",
    lengths: Annotated[str, typer.Option(help="tokens of the text, comma-separated")] = (
        "100,1000,4000"
    ),
    drafters: Annotated[str, typer.Option(help="numbers of drafters, at most 16")] = "1,2,4,8,16",
    max_new_tokens: Annotated[int, typer.Option(help="tokens for each answer")] = 64,
    repeats: Annotated[int, typer.Option(help="turns for each cell")] = 5,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="compile the target")] = False,
) -> None:
    """Decode texts of several lengths with several numbers of drafters, and print the overhead."""
    console = Console()
    loaded = load_target(target, dtype=dtype)
    shared = Target(loaded.model, loaded.tokenizer)
    pool = MetaSD(shared, loaded.tokenizer, drafters=_DRAFTERS, compiled=compiled)
    most = len(pool.router.arms)
    counts = [checks.integer("drafters", k, 1, most) for k in _numbers("drafters", drafters)]
    texts = {n: _text(pool, n) for n in _numbers("lengths", lengths)}
    console.print(f"{machine()}\n{loaded.dtype}, {'compiled' if compiled else 'eager'}, UCB, N = 5")
    costs = defaultdict[tuple[int, int], list[_Cost]](list)
    cells = list(itertools.product(range(repeats), texts, counts))
    _cost(pool, texts[min(texts)], counts[0], _WARM_UP)  # what a process pays once
    for _, n, k in track(cells, "decoding", console=console):
        costs[n, k].append(_cost(pool, texts[n], k, max_new_tokens))
    table = Table(title="Outside forwards: milliseconds a round (percent of decoding)")
    table.add_column("tokens of text", justify="right")
    for k in counts:
        table.add_column(f"K = {k}", justify="right")
    for n in texts:
        table.add_row(str(n), *[_median(costs[n, k]) for k in counts])
    console.print(table)


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise checks.ConfigError(
            f"{name}={text!r} is no list of whole numbers; write it as in 1,2,4"
        ) from None
    return [checks.integer(name, number, 1) for number in numbers]


def _text(pool: MetaSD, n: int) -> list[int]:
    """So many tokens, of our own prompts over and over."""
    assert pool.tokenizer is not None
    tokens = [token for p in own_prompts() for token in chat_tokens(pool.tokenizer, p.text)]
    return list(itertools.islice(itertools.cycle(tokens), n))


def _cost(pool: MetaSD, text: list[int], k: int, max_new_tokens: int) -> _Cost:
    """Of the rounds behind the first few tokens: what starting a query takes is no round's."""
    few, all_ = (_decoded(pool, text, k, n) for n in (_WARM_UP, _WARM_UP + max_new_tokens))
    rounds = all_.rounds - few.rounds
    outside, seconds = _outside(all_) - _outside(few), _decoding(all_) - _decoding(few)
    return _Cost(1e3 * outside / rounds, 100.0 * outside / seconds)


def _decoded(pool: MetaSD, text: list[int], k: int, n: int) -> Statistics:
    output = pool.generate(
        text,
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        pool=pool.router.arms[:k],
        return_dict_in_generate=True,
    )
    assert isinstance(output, Output)
    return output.statistics


def _outside(s: Statistics) -> float:
    return s.bandit_seconds + s.overhead_seconds


def _decoding(s: Statistics) -> float:
    return s.seconds - s.prefill_seconds


def _median(costs: list[_Cost]) -> str:
    milliseconds, share = (statistics.median(side) for side in zip(*costs, strict=True))
    return f"{milliseconds:.2f} ({share:.1f})"


if __name__ == "__main__":
    typer.run(main)
