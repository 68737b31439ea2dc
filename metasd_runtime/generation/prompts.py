"""The rows of a call: prompts, each as often as its number of return sequences asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from transformers import GenerationConfig

from metasd_bandits import checks
from metasd_runtime.decoding.scores import Scores
from metasd_runtime.generation.settings import Settled
from metasd_runtime.model.hf import special_tokens

__all__ = ["Prompt", "check_outputs", "keep_scores", "padding_token", "repeat", "settle_rows"]

_T = TypeVar("_T")


class Prompt(NamedTuple):
    """A prompt's tokens, and how much padding stood before them in their batch."""

    tokens: list[int]
    padding: int = 0


def settle_rows(
    prompts: Sequence[Prompt], settle_row: Callable[..., Settled], seed: int
) -> list[Settled]:
    """Settle every row; a prompt's return sequences follow each other, as in Hugging Face."""
    began = time.time()
    first = settle_row(prompts[0].tokens, padding=prompts[0].padding, seed=seed, began=began)
    times = first.config.num_return_sequences or 1
    rows = [first]
    for row in range(1, len(prompts) * times):
        prompt = prompts[row // times]
        rows.append(
            settle_row(prompt.tokens, padding=prompt.padding, seed=seed, row=row, began=began)
        )
    return rows


def repeat(prompts: Sequence[_T], rows: Sequence[Any]) -> list[_T]:
    """The prompt of each row."""
    times = len(rows) // len(prompts)
    return [prompt for prompt in prompts for _ in range(times)]


def check_outputs(config: GenerationConfig, logprobs: bool, streamer: Any, rows: int) -> None:
    """Refuse what would be asked for in vain."""
    wanted = {
        "output_scores": config.output_scores,
        "output_logits": config.output_logits,
        "output_logprobs": logprobs,
    }
    for name, value in wanted.items():
        if value and not config.return_dict_in_generate:
            raise checks.ConfigError(f"{name} needs return_dict_in_generate=True")
    if streamer is not None and rows > 1:
        raise checks.ConfigError(f"a streamer takes one row, and this call has {rows}")


def keep_scores(row: Settled, prompt_length: int, logprobs: bool) -> Scores:
    """What the row's scores are kept in, if any are."""
    scores, logits = bool(row.config.output_scores), bool(row.config.output_logits)
    kept = Scores(prompt_length, scores=scores, logits=logits, logprobs=logprobs)
    if scores:
        row.stopping.scores_seen = kept.so_far
    return kept


def padding_token(config: GenerationConfig) -> int:
    """What fills up a row that ended early."""
    return special_tokens(config)[1]
