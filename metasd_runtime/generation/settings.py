"""One call of `generate`, settled before any token is produced: what is honoured, what refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from metasd_bandits import checks
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.stopping import Stopping
from metasd_runtime.model.hf import (
    generation_settings,
    has_default_length,
    logits_processors,
    special_tokens,
)
from metasd_runtime.model.target import Target

__all__ = ["GIVES_OUTPUT", "HONOURED", "REFUSED", "Settled", "prompt_tokens", "settle"]

# Every attribute of Hugging Face's GenerationConfig is in one of these two tables (a test holds
# them against the installed version), so that none is ever ignored.
HONOURED = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample
    temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    pad_token_id bos_token_id eos_token_id num_return_sequences output_scores output_logits
    return_dict_in_generate disable_compile transformers_version
    """.split()  # noqa: SIM905
)
GIVES_OUTPUT = frozenset({"output_scores", "output_logits", "return_dict_in_generate"})

# What this decoder does not do, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (None, 0.4),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "assistant_lookbehind": (None, 10),
    "cache_config": (None,),
    "compile_config": (None,),
    "constraints": (None,),
    "continuous_batching_config": (None,),
    "decoder_start_token_id": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "early_stopping": (None, False),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "is_assistant": (None, False),
    "length_penalty": (None, 1.0),
    "low_memory": (None, False),
    "max_cache_len": (None,),
    "max_matching_ngram_size": (None,),
    "num_assistant_tokens": (None, 20),
    "num_assistant_tokens_schedule": (None, "constant"),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "prefill_chunk_size": (None,),
    "prompt_lookup_num_tokens": (None,),
    "speculation_type": (None,),
    "target_lookbehind": (None, 10),
    "token_healing": (None, False),
    "use_cache": (None, True),
    "use_mtp": (None, False),
    "watermarking_config": (None,),
    "cache_implementation": (None, "dynamic"),  # last: generate sets it for some of the above
}
_INSTEAD = {
    "num_assistant_tokens": "; the draft's length is draft_length=N",
    "assistant_confidence_threshold": "; MetaSD's own is draft_threshold=...",
    "prompt_lookup_num_tokens": '; prompt lookup is a drafter, drafters=["prompt-lookup"]',
    "assistant_early_exit": '; early exit is a drafter, drafters=["early-exit:L"]',
}
# Caches that differ from ours in how they are stored, and in no key or value: where a model's own
# settings name one, its text is the same here. (One that rounds, or leaves the device, is not.)
_STORAGE = frozenset({"static", "hybrid", "hybrid_chunked", "sliding_window"})
# They keep a state that follows the calls, and a rejected draft would leave its trace there.
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


class Settled(NamedTuple):
    """One row of a call, ready to decode.

    Attributes
    ----------
    sampling : Sampling
    stopping : Stopping
    config : GenerationConfig
        As Hugging Face would have settled it.
    """

    sampling: Sampling
    stopping: Stopping
    config: GenerationConfig


def prompt_tokens(input_ids: Any, attention_mask: Any, target: Target) -> list[int]:
    """The prompt as a list of ids.

    Raises
    ------
    ConfigError
        If the prompt is empty, padded, one of several, longer than the target's context, or
        holds ids outside its vocabulary.
    """
    ids = torch.as_tensor(input_ids)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise checks.ConfigError(
            f"input_ids has shape {tuple(ids.shape)}; give one prompt, shape (1, length)"
        )
    if ids.shape[1] == 0:
        raise checks.ConfigError("the prompt is empty; give at least one token")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise checks.ConfigError(f"the prompt holds {ids.dtype} values; give whole token ids")
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
        raise checks.ConfigError(
            "attention_mask hides part of the prompt; one prompt needs no padding, so leave it out"
        )
    tokens: list[int] = ids[0].tolist()
    context = target.max_length
    if context is not None and len(tokens) >= context:
        raise checks.ConfigError(
            f"the prompt has {len(tokens)} tokens and the target's context is {context}; "
            f"shorten it to {context - 1} at most"
        )
    if min(tokens) < 0 or max(tokens) >= target.vocab_size:
        raise checks.ConfigError(
            f"the prompt holds ids outside the target's vocabulary [0, {target.vocab_size})"
        )
    return tokens


def settle(
    target: Target,
    tokens: Sequence[int],
    *,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    row: int = 0,
    padding: int = 0,
    began: float | None = None,
    settings: dict[str, Any],
) -> Settled:
    """Settle Hugging Face's generation settings for one row as its own `generate` would.

    Parameters
    ----------
    tokens : sequence of int
        The row's prompt, without padding.
    seed, row : int
        Key of the random numbers.
    padding : int
        Padding tokens that stood before the row in its batch; they count towards ``max_length``
        and ``min_length``, as in Hugging Face.
    began : float, optional
        When the call began (`time.time`), for ``max_time``; now, where it is not given.

    Raises
    ------
    ConfigError
        For a setting that is unknown, out of range, or not honoured by this decoder: by name,
        never ignored.
    """
    for name in ("max_new_tokens", "max_length", "num_return_sequences"):
        if settings.get(name) is not None:
            checks.integer(name, settings[name], 1)
    for name in ("top_p", "typical_p"):  # the library ignores them beyond 1
        if settings.get(name) is not None:
            checks.number(name, settings[name], 0.0, 1.0)
    default_length = has_default_length(target.model, generation_config, settings)
    config, unknown = generation_settings(target.model, generation_config, dict(settings))
    _refuse(config, unknown, target.model.generation_config)
    config.max_length = _max_length(config, len(tokens) + padding, default_length) - padding
    config.min_length = _min_length(config, len(tokens) + padding) - padding
    processors = logits_processors(
        target.model,
        config,
        tokens,
        logits_processor,
        prefix_allowed_tokens_fn,
        row // (config.num_return_sequences or 1),
    )
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise checks.ConfigError(
                f"{type(processor).__name__} keeps a state of its own, which a rejected draft "
                "would spoil; leave it out"
            )
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time, began or time.time()))
    if config.stop_strings is not None:
        tokenizer = tokenizer if tokenizer is not None else target.tokenizer
        if tokenizer is None:
            raise checks.ConfigError("stop_strings needs the tokenizer; pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    stopping = Stopping(
        config.max_length, target.max_length, frozenset(special_tokens(config)[0]), criteria
    )
    return Settled(Sampling(processors, bool(config.do_sample), seed, row), stopping, config)


def _refuse(config: GenerationConfig, unknown: dict[str, Any], of_model: GenerationConfig) -> None:
    for name in unknown:
        checks.choice("argument of generate", name, HONOURED)
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if any(value is n or value == n for n in neutral):
            continue
        instead = _INSTEAD.get(name, "")
        fix = "leave it out"
        if value == getattr(of_model, name, None):
            if name == "cache_implementation" and value in _STORAGE:
                continue
            fix = f"the model's own settings ask for it: model.generation_config.{name} = None"
        raise checks.ConfigError(f"{name}={checks.shown(value)} is not supported{instead}; {fix}")
    rows = config.num_return_sequences
    if rows is not None and rows > 1 and not config.do_sample:
        raise checks.ConfigError(
            f"num_return_sequences={rows} would give the same text {rows} times; set do_sample=True"
        )


def _max_length(config: GenerationConfig, prompt: int, default: bool) -> int:
    """Most tokens of prompt and output: ``max_new_tokens`` first, as in Hugging Face."""
    if config.max_new_tokens is not None:
        return prompt + checks.integer("max_new_tokens", config.max_new_tokens, 1)
    if config.max_length is None or default:  # the library's default means new tokens
        return prompt + 20
    if config.max_length <= prompt:
        raise checks.ConfigError(
            f"max_length={config.max_length} leaves no room behind a prompt of {prompt} tokens; "
            "raise it, or set max_new_tokens"
        )
    return int(config.max_length)


def _min_length(config: GenerationConfig, prompt: int) -> int:
    if config.min_new_tokens is not None:
        return prompt + checks.integer("min_new_tokens", config.min_new_tokens, 0)
    return config.min_length or 0
