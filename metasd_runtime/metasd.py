"""MetaSD: a target, a pool of drafters and a policy behind Hugging Face's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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

from metasd_bandits import Policy, Round, TraceHeader, checks
from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.in_use import Part, in_use
from metasd_runtime.decoding.learned_router import policy_by_name
from metasd_runtime.decoding.loop import Query
from metasd_runtime.decoding.router import Router, Scope
from metasd_runtime.drafters.capped import joint_arms
from metasd_runtime.drafters.eagle.compiled import compile_steps
from metasd_runtime.drafters.registry import make_pool
from metasd_runtime.generation.custom_generate import FrontDoor, behind, prompts_of
from metasd_runtime.generation.options import CallOptions, router_for
from metasd_runtime.generation.output import Interrupted, Output
from metasd_runtime.generation.prompts import (
    Prompt,
    check_outputs,
    keep_scores,
    padding_token,
    repeat,
    settle_rows,
)
from metasd_runtime.generation.request import Request, let_go
from metasd_runtime.generation.settings import Settled, settle
from metasd_runtime.model.compiled import compile_forward
from metasd_runtime.model.load import load_target, log
from metasd_runtime.model.target import Target

if TYPE_CHECKING:
    from metasd_runtime.generation.continuous import Progress, RowOutput

__all__ = ["DEFAULT_DRAFTERS", "Interrupted", "MetaSD", "Output"]

DEFAULT_DRAFTERS = ("prompt-lookup", "suffix", "early-exit", "none")


class MetaSD(FrontDoor):
    """Speculative decoding in which a bandit chooses the drafter, round by round.

    Parameters
    ----------
    target : PreTrainedModel or Target
        A causal LM whose layers are all attention. Sessions that take turns may share a `Target`,
        and with it the cache.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed for stop strings and for checking that a drafter shares the vocabulary.
    drafters : sequence of str or Drafter
        Names as `metasd_runtime.drafters.registry.make_pool` reads them, or objects of your own.
    policy : str or Policy, default "ucb"
        As `metasd_bandits.make_policy` reads it, ``"ucb:beta=0.5"``, or an object of your own.
    reward : {"throughput", "bd", "be"}
        Throughput, the default, is the right one where drafters cost differently.
    draft_length : int, or sequence of int, default 5
        N, the most tokens drafted in a round. Several lengths make joint arms: every drafter
        competes once with each, and the bandit learns the pair.
    draft_threshold : float, default 0
        Stop drafting behind the token at which the product of the drafter's own probabilities
        falls below this; 0 always drafts N.
    shadow : bool
        Let every arm draft in every round, one of them being used, so that the trace carries
        every arm's reward (and `hedge` can learn). Slow; the output stays the same.
    draft_all : bool
        The static ensemble, a baseline: every drafter drafts in every round, all blocks are
        verified and the longest is used; the policy chooses nothing.
    scope : {"query", "carried"}
        Whether the policy forgets between calls (the paper's choice) or carries on.
    compiled : bool
        Compile the target's forward for one token, for a draft block and for prompts, and the
        steps of EAGLE heads (minutes, once; kept in the cache folder), which makes a round
        shorter. The target's forward of a batch stays eager.

    Examples
    --------
    >>> metasd = MetaSD.from_pretrained("smollm2-135m")  # doctest: +SKIP
    >>> ids = metasd.tokenizer("To be, or not", return_tensors="pt").input_ids  # doctest: +SKIP
    >>> metasd.generate(ids, max_new_tokens=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        target: PreTrainedModel | Target,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        drafters: Sequence[str | Drafter] = DEFAULT_DRAFTERS,
        policy: str | Policy = "ucb",
        reward: str = "throughput",
        draft_length: int | Sequence[int] = 5,
        draft_threshold: float = 0.0,
        scope: Scope = "query",
        shadow: bool = False,
        draft_all: bool = False,
        compiled: bool = False,
    ) -> None:
        self.target = target if isinstance(target, Target) else Target(target.eval(), tokenizer)
        self.tokenizer = tokenizer
        pool = make_pool(drafters, self.target)
        if not isinstance(draft_length, int):
            pool, draft_length = joint_arms(pool, draft_length), max(draft_length, default=0)
        self.draft_threshold = checks.number(
            "draft_threshold", draft_threshold, 0.0, 1.0, open_high=True
        )
        self.shadow, self.draft_all = shadow, draft_all
        if draft_all:
            self.target.refuse_trees()
        chosen = policy_by_name(policy, tokenizer)
        self.router = Router(pool, chosen, reward, draft_length, scope)
        self._policy_name = policy if isinstance(policy, str) else repr(policy)
        self._plain_step = 0.0
        self._queries = 0
        if compiled:
            n = self.router.draft_length
            blocks = sorted({1, 1 + n, *self.router.blocks})
            self.target.compiled = compile_forward(
                self.target, blocks, self.router.needs_features, log
            )
            compile_steps(self.router.bases, log)

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
            Chosen by `metasd_runtime.model.load.load_target` where they are not given.
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
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        return_dict_in_generate: bool | None = None,
        output_logprobs: bool = False,
        seed: int | None = None,
        draft_length: int | None = None,
        draft_threshold: float | None = None,
        policy: str | Policy | None = None,
        pool: Sequence[str] | None = None,
        speculate: bool = True,
        shadow: bool | None = None,
        draft_all: bool | None = None,
        trace: str | Path | None = None,
        query: str | None = None,
        on_round: Callable[[Round], None] | None = None,
        **settings: Any,
    ) -> Tensor | Output:
        """Generate, with Hugging Face's names and meanings.

        Parameters
        ----------
        input_ids : (rows, length) or (length,)
            The prompt, or several, decoded together: each row with its own drafter and policy.
        attention_mask : (rows, length), optional
            0 where a row is padded on the left.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, \
streamer, tokenizer
            As in `transformers`; so are ``max_new_tokens``, ``do_sample``, ``temperature``,
            ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``eos_token_id``,
            ``stop_strings``, ``num_return_sequences``, ``output_scores``, ``output_logits`` and
            the other ``settings``. What is not honoured is refused by name.
        return_dict_in_generate : bool, optional
            Return an `Output` instead of the sequences alone.
        output_logprobs : bool
            Have the `Output` carry the target's log-probability of each emitted token.
        seed : int, optional
            Of the sampling and the policy; drawn from torch's generator where it is not given.
        draft_length, draft_threshold, policy, shadow, draft_all : optional
            For this call instead of the session's. A call with a policy or a pool of its own
            neither uses nor changes what the session's policy carries.
        pool : sequence of str, optional
            Names of the drafters that may be used in this call.
        speculate : bool
            False decodes plainly.
        trace : path-like, optional
            Append every round to this file as it ends.
        query : str, optional
            The query's name in the trace; a running number where it is not given. With
            ``num_return_sequences`` above 1 the row is added, as in ``0.2``.
        on_round : callable, optional
            Called with each round's record.

        Returns
        -------
        (rows, length) tensor, or Output

        Raises
        ------
        ConfigError
            Before any token is produced, for whatever cannot work.
        InUseError
            At once, if this object, or a target, drafter or policy that it shares with another,
            is in the middle of a call, in this thread or another.
        Interrupted
            On Ctrl-C, with what was made so far; the trace file is complete up to the last round.
        """
        ids = torch.as_tensor(input_ids)
        prompts = prompts_of(ids, attention_mask, self.target)
        if return_dict_in_generate is not None:
            settings["return_dict_in_generate"] = return_dict_in_generate
        call = functools.partial(
            settle,
            self.target,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            tokenizer=tokenizer,
            settings=settings,
        )
        output, config = self._answer(
            prompts,
            call,
            CallOptions(
                output_logprobs,
                seed,
                draft_length,
                draft_threshold,
                policy,
                pool,
                speculate,
                shadow,
                draft_all,
                trace,
                query,
                on_round,
            ),
            streamer,
        )
        if len(prompts) > 1 or prompts[0].padding:
            sequences = behind(ids, output, prompts, padding_token(config))
            output = replace(output, sequences=sequences, prompt_length=ids.shape[1])
        return output if config.return_dict_in_generate else output.sequences

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
            A bar, or a function that is given a `metasd_runtime.generation.continuous.Progress` after each round.
        trace, on_round
            As for `generate`; the rows' rounds are interleaved, told apart by their query.
        **settings
            As for `generate`, for every prompt; ``draft_length``, ``draft_threshold``, ``policy``,
            ``pool`` and ``speculate`` are of the whole call. ``shadow`` and ``draft_all``, of the
            call or of the session, are refused: they are not done for rows together.

        Yields
        ------
        RowOutput
            An `Output`, with the prompt's ``index`` and the row's ``seed``.

        Raises
        ------
        ConfigError
            For a model or an argument that cannot work, when called; for a prompt that cannot be
            decoded, after those before it have been handed over.
        InUseError
            As for `generate`, at each result. Between results the session may serve other calls,
            but for a carried policy, which is held to the last.
        InterruptedMany
            On Ctrl-C, with what was made so far.
        """
        from metasd_runtime.generation.continuous import generate_many  # it builds on this module

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

    def _answer(
        self,
        prompts: Sequence[Prompt],
        settle_row: Callable[..., Settled],
        options: CallOptions,
        streamer: Any = None,
        prompt_streamed: bool = False,
    ) -> tuple[Output, GenerationConfig]:
        """Settle and decode the rows of a call, while nobody else uses what it uses."""
        with ExitStack() as held:
            try:
                held.enter_context(in_use([self.part]))
                router = router_for(self.router, options, self.tokenizer)
                target = Part("the Target", self.target)
                parts = [target, *router.drafter_parts, *router.policy_parts]
                held.enter_context(in_use(parts))
            except BaseException:
                let_go(streamer)
                raise
            return self._decode(prompts, settle_row, options, router, streamer, prompt_streamed)

    @property
    def part(self) -> Part:
        """The object itself, as something that serves one call at a time."""
        return Part("this MetaSD", self)

    def _decode(
        self,
        prompts: Sequence[Prompt],
        settle_row: Callable[..., Settled],
        options: CallOptions,
        router: Router,
        streamer: Any,
        prompt_streamed: bool,
    ) -> tuple[Output, GenerationConfig]:
        try:
            seed = options.settled_seed()
            settled = settle_rows(prompts, settle_row, seed)
            config = settled[0].config
            check_outputs(config, options.output_logprobs, streamer, len(settled))
            rows = self._queries_for(repeat(prompts, settled), settled, options, seed)
            request = Request(
                self.target,
                router,
                rows,
                self._header(router, options.policy),
                trace=options.trace,
                streamer=streamer,
                prompt_streamed=prompt_streamed,
                pad=padding_token(config),
            )
        except BaseException:
            let_go(streamer)
            raise
        try:
            return request.run(), config
        finally:
            self._plain_step = rows[0].plain_step

    def _queries_for(
        self,
        prompts: Sequence[Prompt],
        settled: Sequence[Settled],
        options: CallOptions,
        seed: int,
    ) -> list[Query]:
        name = options.query if options.query is not None else str(self._queries)
        self._queries += 1
        threshold = options.threshold(self.draft_threshold)
        shadow, draft_all = options.modes(self.shadow, self.draft_all)
        queries = []
        for row, (prompt, one) in enumerate(zip(prompts, settled, strict=True)):
            one.sampling.draft_threshold = threshold
            query = Query(
                name if len(settled) == 1 else f"{name}.{row}",
                list(prompt.tokens),
                one.sampling,
                one.stopping,
                seed + row,
                plain_step=self._plain_step,
                kept=keep_scores(one, len(prompt.tokens), options.output_logprobs),
                shadow=shadow,
                draft_all=draft_all,
            )
            query.on_round = options.on_round
            queries.append(query)
        return queries

    def _header(self, router: Router, policy: str | Policy | None, **more: Any) -> TraceHeader:
        name = self._policy_name if policy is None else str(policy)
        meta = {"target": self.target.model.name_or_path, "scope": router.scope, **more}
        return TraceHeader(router.arms, router.draft_length, name, router.reward_name, meta)
