"""``make bench-batch``: batches against plain batched decoding, and how a drafter pays its debts.

Contenders take turns (A B C D, A B C D ...), so that drift hits all alike; what is printed are
ratios of median tokens/s. Every contender emits the same number of tokens: nothing ends early. Each
run is written as it ends, and a table is printed behind each batch size.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from rich.console import Console
from rich.table import Table

from metasd_runtime.bench import peer_process
from metasd_runtime.bench.machine import machine
from metasd_runtime.bench.peers import Peers, RefusedError
from metasd_runtime.drafters.early_exit import EarlyExit
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.generation.output import Output
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.hf import end_tokens
from metasd_runtime.model.load import LoadedModel, load_target
from metasd_runtime.prompts import chat_tokens, own_prompts

__all__ = ["main"]

Rows = list[list[int]]
Contender = Callable[[Rows, int], tuple[int, float]]
_MODES = ("homogeneous", "heterogeneous")
_STRATEGIES = ("recompute", "streaming", "lazy")


def main(
    target: Annotated[str, typer.Option(help="model name, id or path")] = "smollm2-135m",
    batches: Annotated[str, typer.Option(help="batch sizes")] = "1,2,4,8",
    drafters: Annotated[str, typer.Option(help="the pool")] = "prompt-lookup,suffix,none",
    policy: Annotated[str, typer.Option(help="the policy")] = "ucb",
    draft_length: Annotated[
        str, typer.Option(help="most tokens drafted in a round; 1,5 lets the bandit choose")
    ] = "5",
    max_new_tokens: Annotated[int, typer.Option(help="tokens for each row")] = 64,
    repeats: Annotated[int, typer.Option(help="turns of each contender")] = 3,
    long: Annotated[int, typer.Option(help="tokens of the long prompt; 0 leaves it out")] = 4000,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16")] = None,
    peers: Annotated[
        str | None, typer.Option(help="a Python that has economize and flashspec")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="append each run to this file, a line of JSON")
    ] = None,
) -> None:
    """Time batches side by side, then cache strategies on a long prompt."""
    console = Console()
    lengths = [int(n) for n in draft_length.split(",")]
    with ExitStack() as stack:
        runs = _Runs(None if output is None else stack.enter_context(output.open("a")))
        loaded = load_target(target, dtype=dtype)
        loaded.model.generation_config.eos_token_id = None
        server = None if peers is None else stack.enter_context(Peers(peers, loaded))
        plain = MetaSD(loaded.model, loaded.tokenizer, drafters=["none"])
        meta = MetaSD(
            loaded.model,
            loaded.tokenizer,
            drafters=drafters.split(","),
            policy=policy,
            draft_length=lengths if len(lengths) > 1 else lengths[0],
        )
        console.print(f"{machine()}\n{loaded.dtype}, arms {', '.join(meta.router.arms)}")
        console.print(f"policy {policy}, {max_new_tokens} tokens for each row")
        for size in [int(n) for n in batches.split(",")]:
            contenders = _contenders(loaded, plain, meta, size, server)
            _turns(console, contenders, _rows(loaded, size), max_new_tokens, repeats, runs)
            console.print(_table(runs.batches))
        if long:
            _strategies(loaded, long, max_new_tokens, repeats, runs)
            console.print(_debt_table(runs.debts, long))


class _Runs:
    """What was measured, each written as it comes."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.batches: list[dict[str, Any]] = []
        self.debts: list[dict[str, Any]] = []
        self._write({"machine": machine(), "time": time.strftime("%Y-%m-%d %H:%M:%S")})

    def add(self, kind: list[dict[str, Any]], **run: Any) -> None:
        kind.append(run)
        self._write(run)

    def _write(self, run: dict[str, Any]) -> None:
        if self._file is not None:
            print(json.dumps(run), file=self._file, flush=True)


def _rows(loaded: LoadedModel, size: int) -> Rows:
    """Prompts of different lengths; beyond our own five, the same ones asked more briefly."""
    texts = [prompt.text for prompt in own_prompts()]
    texts += [f"Answer in one sentence. {text}" for text in texts]
    return [chat_tokens(loaded.tokenizer, texts[i % len(texts)]) for i in range(size)]


def _contenders(
    loaded: LoadedModel, plain: MetaSD, meta: MetaSD, size: int, peers: Peers | None
) -> dict[str, Contender]:
    contenders: dict[str, Contender] = {
        "transformers": functools.partial(_theirs, loaded),
        "plain, our loop": functools.partial(_ours, plain),
        **{mode: functools.partial(_ours, meta, mode=mode) for mode in _MODES},
    }
    if size == 1:
        contenders["one prompt, no batch"] = functools.partial(_single, meta)
        contenders |= _assisted(loaded)
    if peers is not None:
        for engine in peer_process.ENGINES:
            contenders[f"{engine} lookup"] = functools.partial(_peer, peers, engine)
    return contenders


def _assisted(loaded: LoadedModel) -> dict[str, Contender]:
    """One prompt, one drafter, blocks of 5: transformers' assisted generation and ours alike."""
    layers = max(1, loaded.model.config.num_hidden_layers // 4)
    theirs: dict[str, dict[str, Any]] = {
        "prompt-lookup": {"prompt_lookup_num_tokens": 5},
        f"early-exit:{layers}": {
            "assistant_early_exit": layers,
            "num_assistant_tokens": 5,
            "num_assistant_tokens_schedule": "constant",
        },
    }
    contenders: dict[str, Contender] = {}
    for name, settings in theirs.items():
        alone = MetaSD(loaded.model, loaded.tokenizer, drafters=[name], policy="fixed", reward="bd")
        contenders[f"transformers, {name}"] = functools.partial(_theirs, loaded, **settings)
        contenders[f"{name} alone"] = functools.partial(_single, alone)
    return contenders


def _ours(metasd: MetaSD, rows: Rows, n: int, mode: Any = "homogeneous") -> tuple[int, float]:
    begin = time.perf_counter()
    outputs = list(
        metasd.generate_many(rows, max_batch=len(rows), mode=mode, seed=0, max_new_tokens=n)
    )
    return sum(len(o.new_tokens) for o in outputs), time.perf_counter() - begin


def _single(metasd: MetaSD, rows: Rows, n: int) -> tuple[int, float]:
    begin = time.perf_counter()
    out = metasd.generate(rows[0], max_new_tokens=n, seed=0, return_dict_in_generate=True)
    assert isinstance(out, Output)
    return len(out.new_tokens), time.perf_counter() - begin


def _theirs(loaded: LoadedModel, rows: Rows, n: int, **settings: Any) -> tuple[int, float]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=loaded.device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=ids.device)
    begin = time.perf_counter()
    out = loaded.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=end_tokens(loaded.model),
        **settings,
    )
    emitted = min(out.shape[1] - width, n)  # prompt lookup of 5.12 may emit one more
    return len(rows) * emitted, time.perf_counter() - begin


def _peer(peers: Peers, engine: str, rows: Rows, n: int) -> tuple[int, float]:
    outputs, seconds = peers.run(engine, rows, n)
    return sum(map(len, outputs)), seconds


def _turns(
    console: Console,
    contenders: dict[str, Contender],
    rows: Rows,
    n: int,
    repeats: int,
    runs: _Runs,
) -> None:
    """Each contender in turn, but for those that refuse while they are warmed up."""
    for name in list(contenders):
        try:
            contenders[name](rows, 4)
        except RefusedError as refused:
            console.print(f"{name} takes no part at batch {len(rows)}: {refused}")
            del contenders[name]
    for _ in range(repeats):
        for name, contender in contenders.items():
            tokens, seconds = contender(rows, n)
            runs.add(runs.batches, batch=len(rows), contender=name, tokens=tokens, seconds=seconds)


def _table(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="tokens/s, as ratios to transformers' plain batched decoding")
    sizes = list(dict.fromkeys(run["batch"] for run in runs))
    table.add_column("contender")
    for size in sizes:
        table.add_column(f"batch {size}", justify="right")
    speed = {
        (r["batch"], r["contender"]): statistics.median(
            x["tokens"] / x["seconds"]
            for x in runs
            if (x["batch"], x["contender"]) == (r["batch"], r["contender"])
        )
        for r in runs
    }
    base = {size: speed[size, "transformers"] for size in sizes}
    table.add_row("transformers, tokens/s", *[f"{base[size]:.1f}" for size in sizes])
    others = dict.fromkeys(run["contender"] for run in runs)
    for name in list(others)[1:]:
        ratios = [speed.get((size, name), 0.0) / base[size] for size in sizes]
        table.add_row(name, *[f"{ratio:.2f}" if ratio else "-" for ratio in ratios])
    return table


def _strategies(loaded: LoadedModel, length: int, n: int, repeats: int, runs: _Runs) -> None:
    """A drafter with a cache of its own, chosen at random against prompt lookup.

    The drafter is a model of the target's first layers (early exit, but with its own cache).
    """
    texts = " ".join(prompt.text for prompt in own_prompts())
    ids = loaded.tokenizer(texts, add_special_tokens=False).input_ids
    prompt = (ids * (length // len(ids) + 1))[:length]
    pools = {}
    for name in _STRATEGIES:
        meta = MetaSD(loaded.model, loaded.tokenizer, drafters=["prompt-lookup"])
        small = EarlyExit(meta.target, max(1, len(meta.target.layers) // 4)).model
        strategy = LanguageModel(small, meta.target.vocab_size, "small", name)
        pools[name] = MetaSD(
            loaded.model, loaded.tokenizer, drafters=["prompt-lookup", strategy], policy="uniform"
        )
    for _ in range(repeats):
        for name, meta in pools.items():
            out = meta.generate(prompt, max_new_tokens=n, seed=0, return_dict_in_generate=True)
            assert isinstance(out, Output)
            s, mine = out.statistics, [r for r in out.trace.rounds if r.arm == 1]
            decoding = s.seconds - s.prefill_seconds
            runs.add(
                runs.debts,
                cache=name,
                tokens_per_second=s.tokens / decoding,
                owed=sum(r.owed for r in mine),
                switch_seconds=s.switch_seconds,
                block_efficiency=s.arms[1].block_efficiency,
                pulls=len(mine),
            )


def _debt_table(runs: list[dict[str, Any]], length: int) -> Table:
    table = Table(title=f"a prompt of {length} tokens, medians; prefill of the target not counted")
    columns = ("tokens_per_second", "owed", "switch_seconds", "block_efficiency", "pulls")
    table.add_column("cache")
    table.add_column("tokens/s against recompute", justify="right")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    median = {
        cache: {c: statistics.median(r[c] for r in runs if r["cache"] == cache) for c in columns}
        for cache in _STRATEGIES
    }
    for cache, values in median.items():
        ratio = values["tokens_per_second"] / median["recompute"]["tokens_per_second"]
        table.add_row(cache, f"{ratio:.2f}", *[f"{values[c]:.3g}" for c in columns])
    return table


if __name__ == "__main__":
    typer.run(main)
