"""Hugging Face's front door: ``model.generate(..., custom_generate=metasd)``.

`generate` prepares its inputs and then calls the loop it was given, but on the way it drops the
streamer and the tokenizer (which stop strings need), merges the caller's own processors with
those of its settings, and counts a batch's padding into both. So the loop here looks up what
`generate` was asked, in its own frame, and settles it afresh, row by row: every argument is either
honoured or refused by name. Tests hold this against the oldest and the newest transformers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from metasd_bandits import Trace, checks
from metasd_runtime.generation.options import CallOptions
from metasd_runtime.generation.output import Output
from metasd_runtime.generation.prompts import Prompt, padding_token
from metasd_runtime.generation.request import let_go
from metasd_runtime.generation.settings import prompt_tokens, settle
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.model.hf import unwrapped
from metasd_runtime.model.target import Target

__all__ = ["FrontDoor", "GenerateOutput", "behind", "prompts_of"]

# Arguments of `generate` and of models that this loop cannot honour, with the values that ask
# for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "assistant_model": (None,),
    "assistant_tokenizer": (None,),
    "negative_prompt_ids": (None,),
    "negative_prompt_attention_mask": (None,),
    "synced_gpus": (None, False),
}


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's output with what MetaSD adds.

    Attributes
    ----------
    sequences, scores, logits
        As in `transformers`. Rows that have ended hold zeros in scores and logits. The cache is
        not given out.
    logprobs, raw_logprobs, trace, statistics, finishes
        As in `Output`.
    """

    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None
    trace: Trace | None = None
    statistics: Statistics | None = None
    finishes: tuple[str, ...] | None = None


class _Handover:
    """The loop's signature, as `generate` inspects it before it forgets what it was given."""

    def __get__(self, loop: Any, owner: type) -> inspect.Signature:
        if loop is None:
            raise AttributeError("__signature__")  # the class keeps its own
        frame = next(_frames(loop), None)
        if frame is not None and frame.f_code.co_name != "generate":
            dropped = frame.f_locals.get("generation_mode_kwargs", {})
            for name in ("tokenizer", "assistant_tokenizer"):
                if dropped.get(name) is not None:
                    frame.f_locals["kwargs"][name] = dropped[name]
        own = inspect.signature(type(loop).__call__.__get__(loop))
        *named, prepared = own.parameters.values()
        options = [
            option.replace(kind=option.KEYWORD_ONLY)
            for option in inspect.signature(CallOptions).parameters.values()
        ]
        return own.replace(parameters=[*named, *options, prepared])


class FrontDoor(ABC):
    """What makes an object fit for ``custom_generate``."""

    __signature__ = _Handover()
    target: Target

    @abstractmethod
    def _answer(self, *args: Any, **kwargs: Any) -> tuple[Output, GenerationConfig]:
        """Decode prompts, each row settled by the function that is given."""

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        tokenizer: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        **prepared: Any,
    ) -> GenerateOutput | Tensor:
        """Decode a call of ``model.generate(**inputs, custom_generate=metasd, ...)``.

        All arguments of `transformers`' generate, and those of `MetaSD.generate` (`CallOptions`).
        Each of a batch's rows is what it would be alone.

        Raises
        ------
        ConfigError
            If the model is not this object's target, or an argument cannot be honoured.
        """
        asked = _asked(self)
        streamer = asked["streamer"]
        try:
            _check_model(self, model)
            asked["assistant_model"] = asked["assistant_model"] or assistant_model
            asked["assistant_tokenizer"] = assistant_tokenizer
            _check_asked(asked)
            call = functools.partial(
                settle,
                self.target,
                generation_config=prepared["generation_config"],
                logits_processor=asked["logits_processor"],
                stopping_criteria=asked["stopping_criteria"],
                prefix_allowed_tokens_fn=asked["prefix_allowed_tokens_fn"],
                tokenizer=tokenizer,
                settings={},
            )
            prompts = _prompts(asked, self.target)
        except BaseException:
            let_go(streamer)
            raise
        output, config = self._answer(
            prompts, call, CallOptions.take(prepared), streamer, prompt_streamed=True
        )
        sequences = behind(input_ids, output, prompts, padding_token(config))
        return _hf_output(output, sequences) if config.return_dict_in_generate else sequences


def _frames(loop: Any) -> Iterator[FrameType]:
    """The frames of transformers that hold this loop as ``custom_generate``, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("custom_generate") is loop:
            yield frame
        frame = frame.f_back


def _asked(loop: Any) -> dict[str, Any]:
    """What `generate` was called with, before it prepared anything."""
    for frame in _frames(loop):
        if frame.f_code.co_name == "generate":
            return dict(frame.f_locals)
    raise checks.ConfigError(
        "a MetaSD object is called by model.generate(..., custom_generate=metasd); "
        "elsewhere use metasd.generate(...)"
    )


def _check_model(metasd: FrontDoor, model: Any) -> None:
    if unwrapped(model) is not metasd.target.model:
        raise checks.ConfigError(
            "custom_generate was given a MetaSD object that was built around another model; "
            "build it as MetaSD(model, tokenizer)"
        )


def _check_asked(asked: dict[str, Any]) -> None:
    for name, neutral in _REFUSED.items():
        value = asked.get(name)
        if not any(value is n for n in neutral):
            raise checks.ConfigError(f"{name} is not supported; leave it out")
    known = vars(GenerationConfig())
    for name, value in asked["kwargs"].items():
        if value is None or name in known or name in ("input_ids", "attention_mask"):
            continue
        raise checks.ConfigError(f"{name} is not supported; leave it out")


def _prompts(asked: dict[str, Any], target: Target) -> list[Prompt]:
    """The batch's rows without their padding."""
    ids = asked["inputs_tensor"]
    mask = asked["kwargs"].get("attention_mask")
    if mask is None:
        mask = asked["model_kwargs"].get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    mask = mask[:: len(mask) // len(ids)]  # generate repeats it for each return sequence
    return unpadded(ids, mask, target)


def prompts_of(ids: Tensor, mask: Any, target: Target) -> list[Prompt]:
    """The prompts of a call: one, shape (length,) or (1, length), or a batch padded on the left."""
    if ids.dim() == 2 and (len(ids) > 1 or (mask is not None and ids.numel())):
        mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
        return unpadded(ids, mask, target)
    return [Prompt(prompt_tokens(ids, mask, target))]


def unpadded(ids: Tensor, mask: Tensor, target: Target) -> list[Prompt]:
    """The rows of a batch without the padding on their left.

    Raises
    ------
    ConfigError
        If the mask has another shape, or hides anything else.
    """
    if mask.shape != ids.shape:
        raise checks.ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}; "
            "give one flag for each token"
        )
    prompts = []
    for row, (one, seen) in enumerate(zip(ids, mask.bool(), strict=True)):
        padding = int((~seen).sum())
        if not bool(seen[padding:].all()):
            raise checks.ConfigError(
                f"row {row} of attention_mask hides tokens other than padding on the left; "
                "set tokenizer.padding_side='left'"
            )
        prompts.append(Prompt(prompt_tokens(one[padding:], None, target), padding))
    return prompts


def behind(input_ids: Tensor, output: Output, prompts: Sequence[Prompt], pad: int) -> Tensor:
    """The new tokens behind the batch as it was given, padding and all."""
    times = len(output.sequences) // len(prompts)
    rows = [
        sequence[len(prompts[row // times].tokens) :].tolist()
        for row, sequence in enumerate(output.sequences)
    ]
    rows = [row[: output.lengths[i]] for i, row in enumerate(rows)]
    longest = max(map(len, rows))
    new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _hf_output(output: Output, sequences: Tensor) -> GenerateOutput:
    fields: dict[str, Any] = {
        name: getattr(output, name)
        for name in ("scores", "logits", "logprobs", "raw_logprobs", "trace", "statistics")
    }
    finishes = tuple(str(finish) for finish in output.finishes)
    return GenerateOutput(sequences=sequences, finishes=finishes, **fields)  # type: ignore[arg-type]
