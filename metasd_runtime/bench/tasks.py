"""The prompts of a suite: read, cut, joined and worded as its tasks say."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from metasd_bandits import checks
from metasd_runtime.bench.suite import OWN_PROMPTS, Suite, Task
from metasd_runtime.prompts import own_prompts, read_prompts
from metasd_runtime.training.prompts import dataset_rows

__all__ = ["Item", "load_items"]


class Item(NamedTuple):
    """A prompt to be decoded by everybody: its task, its name in traces, its text."""

    task: str
    name: str
    text: str


def load_items(suite: Suite, folders: Iterable[Path] = ()) -> list[Item]:
    """All prompts of a suite in the order of decoding: tasks in turn, or shuffled.

    Parameters
    ----------
    suite : Suite
    folders : iterable of Path
        Where its files are sought, in this order.

    Raises
    ------
    ConfigError
        If a source is not there (with where to get it) or holds too few prompts.
    """
    folders = list(folders)
    by_task = [_items(suite, task, folders) for task in suite.tasks]
    items = [item for item in chain.from_iterable(zip_longest(*by_task)) if item is not None]
    if suite.shuffle:
        random.Random(suite.seeds[0]).shuffle(items)
    return items


def _items(suite: Suite, task: Task, folders: list[Path]) -> list[Item]:
    sources = [_gathered(_texts(suite, task, source, folders), task) for source in task.prompts]
    n = min(suite.prompts_per_task, *(len(texts) for texts in sources))
    if n == 0:
        raise checks.ConfigError(
            f"task {task.name!r} has no prompt: {', '.join(task.prompts)} hold too few"
        )
    return [
        Item(task.name, f"{task.name}/{i}", _worded(task, i, [texts[i] for texts in sources]))
        for i in range(n)
    ]


def _worded(task: Task, i: int, texts: list[str]) -> str:
    worded = task.templates[i % len(task.templates)]
    for place, text in enumerate(texts):
        worded = worded.replace(f"{{{place}}}", text)
    return worded


def _gathered(texts: list[str], task: Task) -> list[str]:
    texts = [text.removeprefix(task.cut).strip() for text in texts]
    if task.gather == 1:
        return texts
    whole = len(texts) // task.gather
    return [" ".join(texts[i * task.gather : (i + 1) * task.gather]) for i in range(whole)]


def _texts(suite: Suite, task: Task, source: str, folders: list[Path]) -> list[str]:
    name, _, category = source.partition("#")
    if name == OWN_PROMPTS:
        prompts = own_prompts()
    elif path := next((f / name for f in folders if (f / name).is_file()), None):
        prompts = read_prompts(path)
    elif "/" not in name or name.endswith((".jsonl", ".json")):
        sought = " or ".join(str(folder) for folder in folders)
        raise checks.ConfigError(
            f"task {task.name!r} needs the file {name}, which is not in {sought}; "
            f"give its folder with --data. {suite.data}".rstrip()
        )
    else:
        return [row["prompt"] for _, row in dataset_rows(task.name, name)]
    texts = [p.text for p in prompts if not category or p.task == category]
    if not texts:
        checks.choice(f"category of {name}", category, {p.task for p in prompts})
    return texts
