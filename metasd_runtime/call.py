"""One call of `generate`, settled before any token is produced: what is honoured, what refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from metasd_bandits import checks
from metasd_runtime.hf import generation_settings, logits_processors
from metasd_runtime.sampling import Sampling
from metasd_runtime.stopping import Stopping
from metasd_runtime.target import Target

__all__ = ["prompt_tokens", "settle"]

# Settings that change what is generated in ways this decoder does not do; their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "prompt_lookup_num_tokens": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}


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
    generation_config: GenerationConfig | None,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    settings: dict[str, Any],
) -> tuple[Sampling, Stopping]:
    """Settle Hugging Face's generation settings as its own `generate` would.

    Raises
    ------
    ConfigError
        For a setting that is unknown, out of range, or not honoured by this decoder: by name,
        never ignored.
    """
    given = dict(settings)
    for name in ("max_new_tokens", "max_length"):
        if given.get(name) is not None:
            checks.integer(name, given[name], 1)
    config, unknown = generation_settings(target.model, generation_config, given)
    for name in unknown:
        checks.choice("argument of generate", name, [k for k in vars(config) if k[0] != "_"])
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if not any(value is n or value == n for n in neutral):
            raise checks.ConfigError(f"{name}={value!r} is not supported; leave it out")
    processors = logits_processors(
        target.model, config, len(tokens), logits_processor, target.device
    )
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings is not None:
        tokenizer = tokenizer if tokenizer is not None else target.tokenizer
        if tokenizer is None:
            raise checks.ConfigError("stop_strings needs the tokenizer; pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    stopping = Stopping(_max_length(config, len(tokens)), target.max_length, _eos(config), criteria)
    return Sampling(processors, bool(config.do_sample), seed), stopping


def _max_length(config: GenerationConfig, prompt: int) -> int:
    """Most tokens of prompt and output: ``max_new_tokens`` first, as in Hugging Face."""
    if config.max_new_tokens is not None:
        return prompt + checks.integer("max_new_tokens", config.max_new_tokens, 1)
    if (
        config.max_length is None or config.max_length == 20
    ):  # the library's default means new tokens
        return prompt + 20
    if config.max_length <= prompt:
        raise checks.ConfigError(
            f"max_length={config.max_length} leaves no room behind a prompt of {prompt} tokens; "
            "raise it, or set max_new_tokens"
        )
    return int(config.max_length)


def _eos(config: GenerationConfig) -> frozenset[int]:
    eos = config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [int(eos)])
