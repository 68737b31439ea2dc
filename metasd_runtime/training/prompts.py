"""Prompts of the domains, from JSON Lines or a Hugging Face dataset, as the target reads them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metasd_bandits import checks

__all__ = ["Prompt", "dataset_rows", "encode", "load_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt: its id, unique within its domain, and its tokens, chat template applied."""

    id: str
    tokens: list[int]


def load_prompts(domain: str, source: str, tokenizer: Any, longest: int) -> list[Prompt]:
    """Read a domain's prompts and keep those of at most `longest` tokens, in their order.

    Parameters
    ----------
    domain : str
        Names the domain in messages.
    source : str
        A JSON Lines file of objects with ``prompt`` (and ``id``), or a Hugging Face dataset id,
        ``owner/name`` or ``owner/name:split``, whose rows have a ``prompt``.
    tokenizer : PreTrainedTokenizerBase
    longest : int
        Longer prompts are left out, with a warning that counts them.

    Raises
    ------
    ConfigError
        If the source is not there, is malformed (with the line), or has no prompt left.
    """
    rows = _rows(domain, source)
    prompts = [Prompt(str(row.get("id", i)), encode(tokenizer, row["prompt"])) for i, row in rows]
    if not prompts:
        raise checks.ConfigError(f"domain {domain!r} is empty: {source} holds no prompt")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise checks.ConfigError(f"two prompts of {source} have the id {twice!r}; ids must differ")
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= longest]
    if not kept:
        raise checks.ConfigError(
            f"domain {domain!r} has no prompt left: all {len(prompts)} exceed {longest} tokens; "
            "raise data.max_prompt_tokens or shorten the prompts"
        )
    if len(kept) < len(prompts):
        warnings.warn(
            f"domain {domain!r}: {len(prompts) - len(kept)} of {len(prompts)} prompts exceed "
            f"{longest} tokens and are left out",
            RuntimeWarning,
            stacklevel=2,
        )
    return kept


def encode(tokenizer: Any, text: str) -> list[int]:
    """A user's message as the target reads it: its chat template where it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _rows(domain: str, source: str) -> Sequence[tuple[int, dict[str, Any]]]:
    path = Path(source).expanduser()
    if path.is_file():
        return _json_lines(path)
    owner, slash, _ = source.partition("/")
    if not slash or not owner or owner in (".", "..", "~") or path.suffix in (".jsonl", ".json"):
        raise checks.ConfigError(
            f"domain {domain!r}: there is no file {source}; give a JSON Lines file of prompts, "
            "or a Hugging Face dataset id such as owner/name"
        )
    return dataset_rows(domain, source)


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise checks.ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise checks.ConfigError(f'{path}, line {number} has no "prompt" with a text')
        rows.append((number, row))
    return rows


def dataset_rows(domain: str, source: str) -> list[tuple[int, dict[str, Any]]]:
    """Numbered rows of a Hugging Face dataset, ``owner/name`` or ``owner/name:split``.

    Raises
    ------
    ConfigError
        If the package ``datasets`` is missing, or the dataset has no column ``prompt``.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise checks.ConfigError(
            f"domain {domain!r}: {source} is no file here, and reading a Hugging Face dataset "
            "needs the package datasets (pip install datasets)"
        ) from None
    name, _, split = source.partition(":")
    rows = load_dataset(name, split=split or "train")
    if "prompt" not in rows.column_names:
        raise checks.ConfigError(
            f"domain {domain!r}: dataset {name} has no column prompt, only "
            f"{', '.join(rows.column_names)}"
        )
    return [(i, {"id": f"{name}-{i}", "prompt": row["prompt"]}) for i, row in enumerate(rows)]
