"""The main job, shown: five prompts decoded plainly and with MetaSD, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

from metasd_bandits import Round
from metasd_runtime.bench.agreement import Agreement, compare
from metasd_runtime.drafters.auto import merged_of
from metasd_runtime.metasd import MetaSD, Output
from metasd_runtime.plot import plot_rounds
from metasd_runtime.prompts import Prompt, chat_tokens, own_prompts
from metasd_runtime.report import arm_table

__all__ = ["run"]

# The pool that comes with the default target, five specialists and one drafter for all tasks, and
# prompt lookup: one block is put together from all of them.
_DRAFTERS = ("pool:smollm2-135m", "prompt-lookup")


@dataclass(frozen=True)
class _Pair:
    """One prompt, decoded twice."""

    prompt: Prompt
    plain: Output
    meta: Output
    agreement: Agreement

    @property
    def ratio(self) -> float:
        return self.meta.statistics.tokens_per_second / self.plain.statistics.tokens_per_second


def run(
    out: Path, max_new_tokens: int, dtype: str | None, device: str | None, compiled: bool = False
) -> None:
    """Decode the five prompts, show the tables, leave a trace and a picture in `out`.

    A `compiled` target serves both, so that the ratio is speculation's alone.
    """
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    trace = out / "trace.jsonl"
    trace.unlink(missing_ok=True)
    meta = MetaSD.from_pretrained(dtype=dtype, device=device, drafters=_DRAFTERS, compiled=compiled)
    plain = MetaSD(meta.target, meta.tokenizer, drafters=["none"])
    model = meta.target.model
    console.print(
        f"target {model.name_or_path} ({model.dtype}, {model.device}), "
        f"drafters {', '.join(_names(meta))}, "
        f"reward {meta.router.reward_name}, N = {meta.router.draft_length}"
    )
    for metasd in (plain, meta):  # the first calls of a process warm caches and thread pools
        metasd.generate(_ids(metasd, "Hello."), max_new_tokens=8)
    pairs = [
        _decode_pair(console, plain, meta, prompt, trace, max_new_tokens)
        for prompt in own_prompts()
    ]
    console.print(_summary(pairs))
    rounds: list[Round] = [round_ for pair in pairs for round_ in pair.meta.trace]
    picture = plot_rounds(pairs[0].meta.trace.header, rounds, out / "rounds.png")
    console.print(f"trace: {trace}\npicture: {picture}")


def _names(metasd: MetaSD) -> tuple[str, ...]:
    merged = merged_of(metasd.router)
    return metasd.router.arms if merged is None else merged.proposers


def _ids(metasd: MetaSD, text: str) -> list[int]:
    assert metasd.tokenizer is not None
    return chat_tokens(metasd.tokenizer, text)


def _decode_pair(
    console: Console, plain: MetaSD, meta: MetaSD, prompt: Prompt, trace: Path, max_new_tokens: int
) -> _Pair:
    assert meta.tokenizer is not None
    console.rule(f"[bold]{prompt.task}")
    console.print(prompt.text, style="italic", markup=False, highlight=False)
    ids = _ids(meta, prompt.text)
    outputs = []
    for name, metasd, path in (("plain decoding", plain, None), ("MetaSD", meta, trace)):
        console.print(f"\n[bold]{name}[/bold]")
        output = metasd.generate(
            ids,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            seed=0,
            streamer=TextStreamer(meta.tokenizer, skip_prompt=True, skip_special_tokens=True),
            return_dict_in_generate=True,
            trace=path,
            query=prompt.task,
        )
        assert isinstance(output, Output)
        outputs.append(output)
    first, second = outputs
    agreement = compare(meta.target, ids, first.new_tokens, second.new_tokens)
    pair = _Pair(prompt, first, second, agreement)
    console.print(arm_table(second.statistics))
    console.print(
        f"plain {first.statistics.tokens_per_second:.1f} tokens/s, "
        f"MetaSD {second.statistics.tokens_per_second:.1f} tokens/s, "
        f"ratio {pair.ratio:.2f}; texts agree: {agreement}"
    )
    return pair


def _summary(pairs: list[_Pair]) -> Table:
    table = Table(title="tokens/s of plain decoding and of MetaSD", title_justify="left")
    table.add_column("task", no_wrap=True)
    for column in ("tok/round", "BE", "BD", "plain", "MetaSD", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("agree", no_wrap=True)
    for pair in pairs:
        statistics, rounds = pair.meta.statistics, pair.meta.trace.rounds
        table.add_row(
            pair.prompt.task,
            f"{statistics.tokens_per_round:.2f}",
            f"{sum(r.block_efficiency for r in rounds) / len(rounds):.3f}",
            f"{sum(r.block_divergence for r in rounds) / len(rounds):.3f}",
            f"{pair.plain.statistics.tokens_per_second:.1f}",
            f"{statistics.tokens_per_second:.1f}",
            f"{pair.ratio:.2f}",
            "yes" if pair.agreement.difference is None else f"to {pair.agreement.difference}",
        )
    mean = sum(pair.ratio for pair in pairs) / len(pairs)
    table.add_section()
    table.add_row("mean", "", "", "", "", "", f"{mean:.2f}", "")
    return table
