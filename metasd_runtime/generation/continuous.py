"""Many prompts through a few slots: each joins when one leaves, each result is its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from metasd_bandits import ConfigError, Round, Trace, TraceWriter, checks
from metasd_runtime.decoding.batch import Batch, BatchRow, Mode
from metasd_runtime.decoding.in_use import Part, in_use
from metasd_runtime.decoding.loop import Query
from metasd_runtime.decoding.randomness import row_seed
from metasd_runtime.decoding.router import Router
from metasd_runtime.generation.options import CallOptions, router_for
from metasd_runtime.generation.output import Output, stack_scores
from metasd_runtime.generation.prompts import keep_scores
from metasd_runtime.generation.settings import prompt_tokens, settle
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.ragged import refuse_ragged

__all__ = ["InterruptedMany", "Progress", "RowOutput", "generate_many"]

Order = Literal["input", "completed"]
_NAMED = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "tokenizer",
)


@dataclass(frozen=True)
class RowOutput(Output):
    """An `Output`, and which prompt it answers.

    Attributes
    ----------
    index : int
        The prompt's place in the input, from 0.
    seed : int
        The row's own: decoding the prompt alone with it draws the same random numbers.
    """

    index: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a call of `generate_many` is, after a round.

    Attributes
    ----------
    done, active : int
        Rows that have ended, and rows that are being decoded.
    total : int or None
        Prompts in all, where the input's length is known.
    tokens : int
        Emitted so far.
    seconds : float
        Since the call began.
    """

    done: int
    active: int
    total: int | None
    tokens: int
    seconds: float


class InterruptedMany(KeyboardInterrupt):
    """Ctrl-C among many rows; ``outputs`` holds what was made so far and not yet handed over."""

    def __init__(self, outputs: list[RowOutput]) -> None:
        super().__init__("generation was interrupted")
        self.outputs = outputs


@dataclass
class _Job:
    """A row from its admission to its result."""

    index: int
    query: Query
    prompt_length: int
    begun: float
    rounds: list[Round] = field(default_factory=list)


def generate_many(
    metasd: MetaSD,
    prompts: Iterable[Any],
    *,
    max_batch: int = 8,
    order: Order = "input",
    mode: Mode = "homogeneous",
    seed: int | None = None,
    progress: bool | Callable[[Progress], None] = False,
    trace: str | Path | None = None,
    on_round: Callable[[Round], None] | None = None,
    **settings: Any,
) -> Iterator[RowOutput]:
    """As `metasd_runtime.metasd.MetaSD.generate_many`, which see."""
    checks.integer("max_batch", max_batch, 1)
    checks.choice("order", order, ("input", "completed"))
    checks.choice("mode", mode, ("homogeneous", "heterogeneous"))
    if isinstance(prompts, str | Mapping):
        raise ConfigError("prompts is one prompt; give an iterable of them, such as [prompt]")
    refuse_ragged(metasd.target.model)
    settings |= {"seed": seed, "trace": trace, "on_round": on_round}
    options = CallOptions.take(settings)
    if options.query is not None:
        raise ConfigError("query names one prompt; give it with that prompt, as a mapping")
    modes = options.modes(metasd.shadow, metasd.draft_all)
    for name, wanted in zip(("shadow", "draft_all"), modes, strict=True):
        if wanted:
            raise ConfigError(f"{name} is not done for rows together; use generate, row by row")
    with in_use([metasd.part]):
        router = router_for(metasd.router, options, metasd.tokenizer)
        options = replace(options, seed=options.settled_seed())
        parts = [*router.drafter_parts, *router.policy_parts]
        with in_use(parts):
            batch = Batch(metasd.target, router, max_batch, mode, options.settled_seed())
        total = len(prompts) if isinstance(prompts, Sized) else None
        call = _Many(metasd, router, batch, iter(prompts), options, settings)
    outputs = call.run(_reporter(progress, total), total)
    if not router.carries:
        return _Results(_ordered(outputs, order), [metasd.part, *parts])
    kept = _ordered(_keeping(outputs, router.policy_parts), order)
    return _Results(kept, [metasd.part, *router.drafter_parts])


class _Results(Iterator[RowOutput]):
    """Results as they are asked for, while nobody else uses what makes them."""

    def __init__(self, outputs: Generator[RowOutput, None, None], parts: Sequence[Part]) -> None:
        self._outputs, self._parts = outputs, parts

    def __next__(self) -> RowOutput:
        with in_use(self._parts):
            return next(self._outputs)

    def close(self) -> None:
        """End the call where it stands."""
        self._outputs.close()


def _keeping(outputs: Iterator[RowOutput], parts: Sequence[Part]) -> Iterator[RowOutput]:
    """Hold these between the results as well, to the last."""
    with in_use(parts):
        yield from outputs


def _ordered(outputs: Iterator[RowOutput], order: Order) -> Generator[RowOutput, None, None]:
    """As they come, or each in its turn."""
    held: dict[int, RowOutput] = {}
    turn = 0
    try:
        for output in outputs:
            if order == "completed":
                yield output
                continue
            held[output.index] = output
            while turn in held:
                yield held.pop(turn)
                turn += 1
    except InterruptedMany as interrupted:
        interrupted.outputs[:0] = held.values()
        raise


class _Many:
    """One call: admits prompts while there are slots, rounds until every row has ended."""

    def __init__(
        self,
        metasd: MetaSD,
        router: Router,
        batch: Batch,
        prompts: Iterator[Any],
        options: CallOptions,
        settings: dict[str, Any],
    ) -> None:
        self.metasd, self.batch, self.prompts = metasd, batch, prompts
        self.options, self.settings = options, settings
        self.seed = options.settled_seed()
        self.threshold = options.threshold(metasd.draft_threshold)
        self.header = metasd._header(router, options.policy, mode=batch.mode, max_batch=batch.size)
        self.jobs: dict[BatchRow, _Job] = {}
        self.admitted = 0
        self.failure: Exception | None = None

    def run(self, report: _Reporter, total: int | None) -> Iterator[RowOutput]:
        begin, done, tokens = time.perf_counter(), 0, 0
        with ExitStack() as stack:
            writer = None
            if self.options.trace is not None:
                writer = TraceWriter(self.options.trace, self.header)
                stack.callback(writer.close)
            stack.enter_context(report)
            try:
                while self._admit():
                    for row, round_, emitted in self.batch.round():
                        job = self.jobs[row]
                        job.rounds.append(round_)
                        tokens += len(emitted)
                        if writer is not None:
                            writer.write(round_)
                        if row.query.finish is not None:
                            done += 1
                            yield self._output(row, self.jobs.pop(row))
                    seconds = time.perf_counter() - begin
                    report(Progress(done, len(self.jobs), total, tokens, seconds))
            except KeyboardInterrupt:
                raise InterruptedMany(self._unfinished()) from None
        if self.failure is not None:
            raise self.failure

    def _admit(self) -> bool:
        """Fill the free slots; whether there is anything to decode.

        A prompt that cannot be decoded ends admission: the rows before it are decoded and handed
        over, and then its error is raised.
        """
        while self.failure is None and not self.batch.full:
            try:
                prompt = next(self.prompts)
            except StopIteration:
                break
            except Exception as error:
                self.failure = error
                break
            try:
                job = self._job(self.admitted, prompt)
            except ConfigError as error:
                self.failure = ConfigError(f"prompt {self.admitted}: {error}")
                break
            self.jobs[self.batch.admit(job.query)] = job
            self.admitted += 1
        return bool(self.jobs)

    def _job(self, index: int, prompt: Any) -> _Job:
        """Settle one prompt's call: its own settings over those of all."""
        own: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
        if "input_ids" not in own:
            raise ConfigError("a prompt given as a mapping needs its 'input_ids'")
        ids, mask = own.pop("input_ids"), own.pop("attention_mask", None)
        seed = own.pop("seed", None)
        seed = row_seed(self.seed, index) if seed is None else checks.integer("seed", seed, 0)
        name = own.pop("query", None)
        logprobs = own.pop("output_logprobs", self.options.output_logprobs)
        for option in CallOptions.names() & own.keys():
            raise ConfigError(f"{option} is of the whole call; give it to generate_many")
        settings = {**self.settings, **own}
        tokens = prompt_tokens(self._encode(ids), mask, self.metasd.target)
        named = {key: settings.pop(key, None) for key in _NAMED}
        settled = settle(self.metasd.target, tokens, **named, seed=seed, settings=settings)
        if (settled.config.num_return_sequences or 1) > 1:
            raise ConfigError(
                "num_return_sequences is not supported here; give the prompt as often as you like"
            )
        sampling, stopping = settled.sampling, settled.stopping
        sampling.draft_threshold = self.threshold
        query = Query(str(index) if name is None else name, tokens, sampling, stopping, seed)
        query.kept = keep_scores(settled, len(tokens), logprobs)
        query.on_round = self.options.on_round
        return _Job(index, query, len(tokens), time.perf_counter())

    def _encode(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        if self.metasd.tokenizer is None:
            raise ConfigError("a prompt of text needs a tokenizer; give MetaSD one, or token ids")
        return self.metasd.tokenizer(prompt, return_tensors="pt").input_ids

    def _output(self, row: BatchRow, job: _Job) -> RowOutput:
        query = job.query
        assert query.finish is not None
        statistics = Statistics.of(
            self.header.arms,
            job.rounds,
            seconds=time.perf_counter() - job.begun,
            prefill_seconds=query.prefill_seconds,
            bandit_seconds=row.router.bandit_seconds,
            target_forwards=len(job.rounds) + 1,
        )
        sequences: Tensor = torch.tensor([query.tokens], device=self.metasd.target.device)
        return RowOutput(
            sequences,
            Trace(self.header, job.rounds),
            statistics,
            query.finish,
            job.prompt_length,
            (query.finish,),
            (len(query.tokens) - job.prompt_length,),
            **stack_scores([query.kept]),  # type: ignore[arg-type]
            index=job.index,
            seed=query.seed,
        )

    def _unfinished(self) -> list[RowOutput]:
        outputs = []
        for row, job in self.jobs.items():
            job.query.interrupt(job.prompt_length, sum(r.emitted for r in job.rounds))
            outputs.append(self._output(row, job))
        return outputs


class _Reporter:
    """Passes progress on; a bar of `rich`, the user's function, or nobody."""

    def __init__(self, tell: Callable[[Progress], None] | None = None) -> None:
        self._tell = tell

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def __call__(self, progress: Progress) -> None:
        if self._tell is not None:
            self._tell(progress)


class _Bar(_Reporter):
    def __init__(self, total: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        speed = TextColumn("{task.fields[speed]:.1f} tokens/s")
        self._bar = RichProgress(BarColumn(), MofNCompleteColumn(), speed, TimeElapsedColumn())
        self._task = self._bar.add_task("prompts", total=total, speed=0.0)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        speed = progress.tokens / progress.seconds if progress.seconds else 0.0
        self._bar.update(self._task, completed=progress.done, speed=speed)


def _reporter(progress: bool | Callable[[Progress], None], total: int | None) -> _Reporter:
    if progress is True:
        return _Bar(total)
    return _Reporter(progress if callable(progress) else None)
