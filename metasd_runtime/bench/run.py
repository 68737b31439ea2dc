"""Decode a suite and record it: one line for each batch of prompts, method and setting.

The output folder holds ``results.jsonl`` (a header, then a line as each answer is done) and
``traces/``, one file for each method and setting. A run that was killed goes on: what has a line
is not decoded again, what a contender carries from prompt to prompt is taken from its last line.
A contender that refuses is left out, and that is said; what it answered before stays.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metasd_bandits import Round, TraceHeader, TraceWriter, checks, read_trace
from metasd_bandits.traces.parquet import beside
from metasd_runtime.bench.agreement import Agreement, compare
from metasd_runtime.bench.machine import machine
from metasd_runtime.bench.methods import Answer, Contender
from metasd_runtime.bench.peers import RefusedError
from metasd_runtime.bench.suite import Suite
from metasd_runtime.bench.tasks import Item
from metasd_runtime.decoding.randomness import row_seed
from metasd_runtime.model.load import LoadedModel, log
from metasd_runtime.model.target import Target
from metasd_runtime.prompts import chat_tokens

__all__ = ["FORMAT", "RESULTS", "TRACES", "VERSION", "Step", "run"]

FORMAT, VERSION = "metasd-bench", 1
RESULTS, TRACES = "results.jsonl", "traces"
_PARTS = ("prefill", "draft", "verify", "switch", "bandit", "overhead")

Line = dict[str, Any]


class Step(NamedTuple):
    """Progress: what is about to be decoded, and how much is done."""

    task: str
    method: str
    done: int
    total: int


class _Group(NamedTuple):
    """Prompts that are decoded together; one, but for batches."""

    task: str
    name: str
    number: int
    names: list[str]
    prompts: list[list[int]]


def run(
    suite: Suite,
    loaded: LoadedModel,
    items: Sequence[Item],
    everybody: Sequence[Contender],
    folder: Path,
    progress: Callable[[Step], None] = lambda step: None,
) -> None:
    """Decode whatever has no line yet, methods taking turns prompt by prompt.

    Parameters
    ----------
    suite, loaded, items, everybody
        What is measured, on which target, with which prompts, by whom.
    folder : Path
        Made if it is not there.
    progress : callable
        Called before each answer, and once behind the last.

    Raises
    ------
    ConfigError
        If the folder holds the results of another suite or machine.
    """
    folder.joinpath(TRACES).mkdir(parents=True, exist_ok=True)
    groups = {size: _groups(items, loaded, size) for size in suite.batches}
    header = _header(suite, loaded)
    lines = _read(folder / RESULTS, header)
    everybody = _warmed_up(everybody, _tokens(loaded, "Say hello."), suite.warm_up)
    jobs = list(_jobs(groups, everybody))
    done = {_key(line): line for line in lines}
    answers = len({*done, *((group.name, contender.slug) for group, contender in jobs)})
    _begin(folder / RESULTS, {**header, "answers": answers}, lines)
    _resume(everybody, groups, lines, folder)
    gone: set[Contender] = set()
    target = Target(loaded.model, loaded.tokenizer)
    for number, (group, contender) in enumerate(jobs):
        key = (group.name, contender.slug)
        if key in done or contender in gone:
            continue
        progress(Step(group.task, contender.method, number, len(jobs)))
        seed = row_seed(contender.setting.seed, group.number)
        try:
            answer = contender.decode(group.prompts, group.names, seed)
        except RefusedError as refused:
            log(f"{contender.method} takes no further part from {group.name} on: {refused}")
            gone.add(contender)
            continue
        plain = done.get((group.name, _baseline(contender, everybody).slug))
        line = _line(group, contender, answer, _agreement(target, group, answer, plain, contender))
        _write_trace(folder, contender, answer.rounds)
        _append(folder / RESULTS, line)
        done[key] = line
    progress(Step("", "", len(jobs), len(jobs)))


def _warmed_up(everybody: Sequence[Contender], prompt: list[int], tokens: int) -> list[Contender]:
    """Those that are ready; of the others, why not, once for all seeds."""
    ready: list[Contender] = []
    said: set[str] = set()
    for contender in everybody:
        try:
            contender.warm_up(prompt, tokens)
            ready.append(contender)
        except RefusedError as refused:
            at = f"temperature {contender.setting.temperature:g}, batch {contender.setting.batch}"
            text = f"{contender.method} takes no part at {at}: {refused}"
            if text not in said:
                log(text)
            said.add(text)
    return ready


def _tokens(loaded: LoadedModel, text: str) -> list[int]:
    return chat_tokens(loaded.tokenizer, text)


def _groups(items: Sequence[Item], loaded: LoadedModel, size: int) -> list[_Group]:
    """Prompts in the order of decoding; in a batch, those of one task that come together."""
    waiting: dict[str, list[Item]] = defaultdict(list)
    groups: list[_Group] = []
    last = {item.task: item.name for item in items}
    for item in items:
        together = waiting[item.task]
        together.append(item)
        if len(together) == size or item.name == last[item.task]:
            prompts = [_tokens(loaded, one.text) for one in together]
            names = [one.name for one in together]
            name = names[0] if size == 1 else f"{names[0]}+{len(names) - 1}"
            groups.append(_Group(item.task, name, len(groups), names, prompts))
            together.clear()
    return groups


def _jobs(
    groups: dict[int, list[_Group]], everybody: Sequence[Contender]
) -> Iterator[tuple[_Group, Contender]]:
    """Prompt by prompt, everybody in turn."""
    for size, some in groups.items():
        for group in some:
            for contender in everybody:
                if contender.setting.batch == size:
                    yield group, contender


def _baseline(contender: Contender, everybody: Sequence[Contender]) -> Contender:
    """Plain decoding under the same temperature, seed and batch size."""
    wanted = contender.setting._replace(draft_length=None)
    return next(c for c in everybody if c.kind == "plain" and c.setting == wanted)


def _agreement(
    target: Target, group: _Group, answer: Answer, plain: Line | None, contender: Contender
) -> Agreement:
    """How a greedy answer compares with plain decoding's; the first row that differs counts."""
    if contender.setting.temperature > 0 or plain is None:
        return Agreement(None, None)
    for prompt, mine, theirs in zip(group.prompts, answer.outputs, plain["output"], strict=True):
        agreement = compare(target, prompt, theirs, mine)
        if agreement.difference is not None:
            return agreement
    return Agreement(None, None)


def _line(group: _Group, contender: Contender, answer: Answer, agreement: Agreement) -> Line:
    s = answer.statistics
    return {
        "task": group.task,
        "prompt": group.name,
        "method": contender.method,
        "kind": contender.kind,
        **contender.setting._asdict(),
        "slug": contender.slug,
        "prompt_tokens": sum(map(len, group.prompts)),
        "tokens": sum(map(len, answer.outputs)),
        "seconds": answer.seconds,
        "rounds": len(answer.rounds),
        "target_forwards": None if s is None else s.target_forwards,
        **{f"{p}_seconds": None if s is None else getattr(s, f"{p}_seconds") for p in _PARTS},
        "difference": agreement.difference,
        "gap": agreement.gap,
        "output": answer.outputs,
        "state": contender.state(),
    }


def _key(line: Line) -> tuple[str, str]:
    return line["prompt"], line["slug"]


def _header(suite: Suite, loaded: LoadedModel) -> Line:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "suite": suite.as_dict(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "machine": machine(),
    }
    return json.loads(json.dumps(header))  # as it will be read: lists for tuples


def _read(path: Path, header: Line) -> list[Line]:
    """The lines there are, of this suite and machine; one that was cut off is not among them."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    theirs = lines[0] if lines else {}
    if text and (other := [name for name in header if theirs.get(name) != header[name]]):
        raise checks.ConfigError(
            f"{path} holds results of another {' and '.join(other)}; give another --output, or "
            "remove the folder to begin anew"
        )
    return lines[1:]


def _begin(path: Path, header: Line, lines: Sequence[Line]) -> None:
    """Have the file hold these; who takes part, and so the number of answers, may have changed."""
    text = "".join(_text(line) for line in (header, *lines))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        _replace(path, text)


def _resume(
    everybody: Sequence[Contender],
    groups: dict[int, list[_Group]],
    lines: Sequence[Line],
    folder: Path,
) -> None:
    prompts = {(size, g.name): g for size, some in groups.items() for g in some}
    for contender in everybody:
        mine = [line for line in lines if line["slug"] == contender.slug]
        _trim_trace(folder, contender, mine)
        answered = []
        for line in mine:
            group = prompts[line["batch"], line["prompt"]]
            answered += list(zip(group.prompts, line["output"], strict=True))
        if mine:
            contender.resume(answered, mine[-1]["state"])


def _trace_path(folder: Path, contender: Contender) -> Path:
    return folder / TRACES / f"{contender.slug}.jsonl"


def _write_trace(folder: Path, contender: Contender, rounds: Sequence[Round]) -> None:
    header = contender.header
    if header is not None:
        _write_rounds(_trace_path(folder, contender), header, rounds)


def _write_rounds(path: Path, header: TraceHeader, rounds: Sequence[Round]) -> None:
    with TraceWriter(path, header) as writer:
        for round_ in rounds:
            writer.write(round_)


def _trim_trace(folder: Path, contender: Contender, lines: Sequence[Line]) -> None:
    """Rounds of an answer that has no line yet were written just before the run was killed."""
    path = _trace_path(folder, contender)
    if not path.exists():
        return
    trace, finished = read_trace(path), sum(line["rounds"] for line in lines)
    if finished < len(trace):
        temporary = beside(path)
        temporary.unlink(missing_ok=True)
        _write_rounds(temporary, trace.header, trace.rounds[:finished])
        os.replace(temporary, path)


def _append(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_text(line))


def _text(line: Line) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = beside(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
