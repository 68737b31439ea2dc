"""MetaSD: a target, a pool of drafters and a policy behind Hugging Face's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from metasd_bandits import Policy, Round, Trace, TraceHeader, TraceWriter
from metasd_runtime.call import prompt_tokens, settle
from metasd_runtime.decoder import Query, decode
from metasd_runtime.draft import Drafter
from metasd_runtime.drafters import make_drafter
from metasd_runtime.models import load_target
from metasd_runtime.router import Router, Scope
from metasd_runtime.statistics import Statistics
from metasd_runtime.stopping import Finish
from metasd_runtime.target import Target

if TYPE_CHECKING:
    from metasd_runtime.many import Progress, RowOutput

__all__ = ["DEFAULT_DRAFTERS", "Interrupted", "MetaSD", "Output"]

DEFAULT_DRAFTERS = ("prompt-lookup", "suffix", "early-exit", "none")


@dataclass(frozen=True)
class Output:
    """What a call of `MetaSD.generate` made.

    Attributes
    ----------
    sequences : (1, length) int64
        Prompt and output.
    trace : Trace
        Header and rounds.
    statistics : Statistics
        Per arm and in all.
    finish : Finish
        Why the text ended.
    prompt_length : int
    """

    sequences: Tensor
    trace: Trace
    statistics: Statistics
    finish: Finish
    prompt_length: int

    @property
    def new_tokens(self) -> list[int]:
        """The emitted tokens."""
        return self.sequences[0, self.prompt_length :].tolist()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in mid-generation; ``output`` holds what was made so far."""

    def __init__(self, output: Output) -> None:
        super().__init__("generation was interrupted")
        self.output = output


class MetaSD:
    """Speculative decoding in which a bandit chooses the drafter, round by round.

    Parameters
    ----------
    target : PreTrainedModel
        A causal LM whose layers are all attention.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed for stop strings and for checking that a drafter shares the vocabulary.
    drafters : sequence of str or Drafter
        Names as `metasd_runtime.drafters.make_drafter` reads them, or objects of your own.
    policy : str or Policy, default "ucb"
        As `metasd_bandits.make_policy` reads it, ``"ucb:beta=0.5"``, or an object of your own.
    reward : {"throughput", "bd", "be"}
        Throughput, the default, is the right one where drafters cost differently.
    draft_length : int, default 5
        N, the most tokens drafted in a round.
    scope : {"query", "carried"}
        Whether the policy forgets between calls (the paper's choice) or carries on.

    Examples
    --------
    >>> metasd = MetaSD.from_pretrained("smollm2-135m")  # doctest: +SKIP
    >>> ids = metasd.tokenizer("To be, or not", return_tensors="pt").input_ids  # doctest: +SKIP
    >>> metasd.generate(ids, max_new_tokens=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        drafters: Sequence[str | Drafter] = DEFAULT_DRAFTERS,
        policy: str | Policy = "ucb",
        reward: str = "throughput",
        draft_length: int = 5,
        scope: Scope = "query",
    ) -> None:
        self.target = Target(target.eval(), tokenizer)
        self.tokenizer = tokenizer
        pool = [make_drafter(drafter, self.target) for drafter in drafters]
        self.router = Router(pool, policy, reward, draft_length, scope)
        self._policy_name = policy if isinstance(policy, str) else repr(policy)
        self._plain_step = 0.0
        self._queries = 0

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path = "smollm2-135m",
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> MetaSD:
        """Load a target by name, Hugging Face id or path, and build the rest around it.

        Parameters
        ----------
        target : str or Path
            ``"smollm2-135m"``, the embedded default, or any causal LM.
        dtype, device : optional
            Chosen by `metasd_runtime.models.load_target` where they are not given.
        **options
            As for `MetaSD`.
        """
        loaded = load_target(target, dtype=dtype, device=device)
        return cls(loaded.model, loaded.tokenizer, **options)

    def generate(
        self,
        input_ids: Tensor | Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        return_dict_in_generate: bool = False,
        seed: int | None = None,
        trace: str | Path | None = None,
        query: str | None = None,
        on_round: Callable[[Round], None] | None = None,
        **settings: Any,
    ) -> Tensor | Output:
        """Generate, with Hugging Face's names and meanings.

        Parameters
        ----------
        input_ids : (1, length) or (length,)
            The prompt.
        generation_config, logits_processor, stopping_criteria, streamer, tokenizer
            As in `transformers`; so are ``max_new_tokens``, ``do_sample``, ``temperature``,
            ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``eos_token_id``,
            ``stop_strings`` and the other ``settings``. What is not honoured is refused by name.
        return_dict_in_generate : bool
            Return an `Output` instead of the sequences alone.
        seed : int, optional
            Of the sampling and the policy; drawn from torch's generator where it is not given.
        trace : path-like, optional
            Append every round to this file as it ends.
        query : str, optional
            The query's name in the trace; a running number where it is not given.
        on_round : callable, optional
            Called with each round's record.

        Returns
        -------
        (1, length) tensor, or Output

        Raises
        ------
        ConfigError
            Before any token is produced, for whatever cannot work.
        Interrupted
            On Ctrl-C, with what was made so far; the trace file is complete up to the last round.
        """
        target = self.target
        tokens = prompt_tokens(input_ids, attention_mask, target)
        seed = int(torch.randint(2**62, (1,))) if seed is None else seed
        sampling, stopping = settle(
            target,
            tokens,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            seed=seed,
            settings=settings,
        )
        name = query if query is not None else str(self._queries)
        self._queries += 1
        state = Query(name, tokens, sampling, stopping, seed, plain_step=self._plain_step)
        state.on_round = on_round
        call = _Call(self, state, trace, streamer)
        output = call.run()
        self._plain_step = state.plain_step
        return output if return_dict_in_generate else output.sequences

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        max_batch: int = 8,
        order: Literal["input", "completed"] = "input",
        mode: Literal["homogeneous", "heterogeneous"] = "homogeneous",
        seed: int | None = None,
        progress: bool | Callable[[Progress], None] = False,
        trace: str | Path | None = None,
        on_round: Callable[[Round], None] | None = None,
        **settings: Any,
    ) -> Iterator[RowOutput]:
        """Decode many prompts, several at a time: one joins when another has ended.

        Parameters
        ----------
        prompts : iterable
            Each a list of ids, a tensor of shape (length,) or (1, length), a text (where there
            is a tokenizer), or a mapping with ``input_ids`` and whatever is this prompt's own:
            ``seed``, ``query`` (its name in the trace), ``max_new_tokens``,
            ``stopping_criteria`` and any other of the `settings`. Drawn from as slots come free.
        max_batch : int, default 8
            Most rows at a time.
        order : {"input", "completed"}
            Results in the order of the prompts (those that end early are held), or as they end.
        mode : {"homogeneous", "heterogeneous"}
            One drafter a round for all rows, from whose rounds one policy learns; or each row
            its own drafter and policy.
        seed : int, optional
            Each row's own is derived from it and the row's number; drawn from torch's generator
            where it is not given.
        progress : bool or callable
            A bar, or a function that is given a `metasd_runtime.many.Progress` after each round.
        trace, on_round
            As for `generate`; the rows' rounds are interleaved, told apart by their query.
        **settings
            As for `generate`, for every prompt.

        Yields
        ------
        RowOutput
            An `Output`, with the prompt's ``index`` and the row's ``seed``.

        Raises
        ------
        ConfigError
            For a model or an argument that cannot work, when called; for a prompt that cannot be
            decoded, after those before it have been handed over.
        InterruptedMany
            On Ctrl-C, with what was made so far.
        """
        from metasd_runtime.many import generate_many  # it builds on this module

        return generate_many(
            self,
            prompts,
            max_batch=max_batch,
            order=order,
            mode=mode,
            seed=seed,
            progress=progress,
            trace=trace,
            on_round=on_round,
            **settings,
        )


class _Call:
    """A query with its clock, its streamer and its trace."""

    def __init__(
        self, metasd: MetaSD, query: Query, trace: str | Path | None, streamer: Any
    ) -> None:
        self.metasd, self.query, self.streamer = metasd, query, streamer
        router = metasd.router
        self.header = TraceHeader(
            router.arms,
            router.draft_length,
            metasd._policy_name,
            router.reward_name,
            {"target": metasd.target.model.name_or_path, "scope": router.scope},
        )
        self.writer = None if trace is None else TraceWriter(trace, self.header)
        self.rounds: list[Round] = []
        self.prompt_length = len(query.tokens)

    def run(self) -> Output:
        metasd, query = self.metasd, self.query
        self._stream(query.tokens)
        forwards = metasd.target.forwards
        begin = time.perf_counter()
        try:
            for round_, emitted in decode(query, metasd.target, metasd.router):
                self.rounds.append(round_)
                if self.writer is not None:
                    self.writer.write(round_)
                self._stream(emitted)
        except KeyboardInterrupt:
            query.finish = Finish.INTERRUPTED
            seconds = time.perf_counter() - begin
            raise Interrupted(self._output(seconds, forwards)) from None
        finally:
            if self.writer is not None:
                self.writer.close()
            if self.streamer is not None:
                self.streamer.end()
        return self._output(time.perf_counter() - begin, forwards)

    def _stream(self, tokens: Sequence[int]) -> None:
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))

    def _output(self, seconds: float, forwards: int) -> Output:
        metasd, query = self.metasd, self.query
        assert query.finish is not None
        statistics = Statistics.of(
            metasd.router.arms,
            self.rounds,
            seconds=seconds,
            prefill_seconds=query.prefill_seconds,
            bandit_seconds=metasd.router.bandit_seconds,
            target_forwards=metasd.target.forwards - forwards,
        )
        sequences = torch.tensor([query.tokens], device=metasd.target.device)
        return Output(
            sequences, Trace(self.header, self.rounds), statistics, query.finish, self.prompt_length
        )
