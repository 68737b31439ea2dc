"""How a pool drafts on prompts of another kind than those it learned from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from metasd_bandits import checks
from metasd_runtime.drafters.pool import read_trained
from metasd_runtime.model.load import LoadedModel
from metasd_runtime.prompts import read_prompts
from metasd_runtime.training.answers import Answerer, answer_all, ends_of
from metasd_runtime.training.corpus import Text, read_texts
from metasd_runtime.training.evaluate import Acceptance, evaluate
from metasd_runtime.training.kinds import student_of
from metasd_runtime.training.prompts import Prompt, encode

__all__ = ["evaluate_on", "prompts_of"]

_BATCH = 32


def prompts_of(sources: Sequence[str], most: int) -> dict[str, list[str]]:
    """Texts by task, from ``TASK=FILE`` or ``TASK=FILE#CATEGORY``: the first `most` of each.

    Raises
    ------
    ConfigError
        If a source is spelled otherwise, is no file, or has no such category.
    """
    prompts: dict[str, list[str]] = {}
    for source in sources:
        task, equals, place = source.partition("=")
        name, _, category = place.partition("#")
        if not (equals and task and Path(name).is_file()):
            raise checks.ConfigError(
                f"{source!r} names no prompts; write TASK=FILE or TASK=FILE#CATEGORY, a JSON Lines "
                "file that is there"
            )
        lines = read_prompts(Path(name))
        if category:
            checks.choice(f"category of {name}", category, {line.task for line in lines})
        texts = [line.text for line in lines if not category or line.task == category]
        prompts[task] = texts[:most]
    return prompts


def evaluate_on(
    path: Path,
    loaded: LoadedModel,
    prompts: Mapping[str, Sequence[str]],
    max_new_tokens: int = 100,
    progress: Callable[[str, int, int, str], None] = lambda step, done, total, remark: None,
) -> dict[str, dict[str, Acceptance]]:
    """Let the target answer greedily, and every drafter with weights follow each answer.

    Parameters
    ----------
    path : Path
        The pool's folder.
    prompts : mapping of str to sequence of str
        By task.
    max_new_tokens : int
        Longer answers are cut.
    progress : callable
        Told the step, how far it is, how far it goes, and a remark.

    Returns
    -------
    dict of dict of Acceptance
        By drafter, then task.
    """
    model = loaded.model
    vocabulary, trained = read_trained(path)
    layers = sorted({layer for t in trained.values() for layer in getattr(t.shape, "layers", ())})
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    with tempfile.TemporaryDirectory() as folder:
        texts = _answered(loaded, prompts, tuple({*layers, last}), Path(folder), max_new_tokens)
        output = model.get_output_embeddings().weight.detach()
        matrix: dict[str, dict[str, Acceptance]] = {}
        for done, (name, one) in enumerate(trained.items()):
            progress("evaluation", done, len(trained), name)
            student = student_of(one.shape, dict(one.weights), model)
            matrix[name] = {
                task: evaluate(student, own, output, vocabulary.to(output.device))
                for task, own in texts.items()
            }
        progress("evaluation", len(trained), len(trained), "")
    return matrix


def _answered(
    loaded: LoadedModel,
    prompts: Mapping[str, Sequence[str]],
    layers: tuple[int, ...],
    folder: Path,
    max_new_tokens: int,
) -> dict[str, list[Text]]:
    answerer = Answerer(loaded.model, ends_of(loaded.model), max_new_tokens, tuple(sorted(layers)))
    texts = {}
    for task, own in prompts.items():
        encoded = [Prompt(str(i), encode(loaded.tokenizer, text)) for i, text in enumerate(own)]
        answer_all(
            answerer, {task: encoded}, folder, held_out=len(own), batch=_BATCH, tokens=1, seed=0
        )
        texts[task] = [text for _, text in read_texts(folder, task)]
    return texts
