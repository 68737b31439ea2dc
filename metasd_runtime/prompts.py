"""Prompts: the five of our own, and JSON Lines files of the user's."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from metasd_bandits import checks

__all__ = ["Prompt", "chat_tokens", "first_of_each", "own_prompts", "read_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A task's name and a text to answer."""

    task: str
    text: str


def own_prompts() -> list[Prompt]:
    """Code, translation, summarization, question answering and mathematics, one of each."""
    text = resources.files("metasd_runtime").joinpath("prompts.toml").read_text(encoding="utf-8")
    return [Prompt(p["task"], p["text"].strip()) for p in tomllib.loads(text)["prompt"]]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts from JSON Lines: ``prompt``, or ``turns`` (the first is taken), and ``category``.

    Raises
    ------
    ConfigError
        If a line is not JSON or holds neither field; the message names the line.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["prompt"] if "prompt" in row else row["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise checks.ConfigError(
                f"{path}:{number} is not a JSON object with 'prompt' or 'turns'"
            ) from None
        prompts.append(Prompt(str(row.get("category", "prompt")), text))
    return prompts


def first_of_each(prompts: Iterable[Prompt], n: int) -> list[Prompt]:
    """The first n prompts of each task, task by task."""
    kept: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kept.setdefault(prompt.task, []).append(prompt)
    return [prompt for some in kept.values() for prompt in some[:n]]


def chat_tokens(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool = False) -> list[int]:
    """Token ids of a user's message in the tokenizer's chat template, or of the bare text.

    Parameters
    ----------
    raw : bool
        Leave the template out; as for a tokenizer that has none.
    """
    if raw or not tokenizer.chat_template:
        return list(tokenizer(text).input_ids)
    message = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(written, add_special_tokens=False).input_ids)
