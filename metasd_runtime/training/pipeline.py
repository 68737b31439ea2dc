"""Training a pool from start to end; every step continues where an earlier run stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.drafters.eagle_head import EagleShape
from metasd_runtime.models import LoadedModel
from metasd_runtime.pool import save_pool
from metasd_runtime.training.answers import Answerer, answer_all
from metasd_runtime.training.config import PoolConfig
from metasd_runtime.training.corpus import (
    Corpus,
    Text,
    batches,
    draft_vocabulary,
    load_corpus,
)
from metasd_runtime.training.eagle_model import EagleModel
from metasd_runtime.training.evaluate import Acceptance, evaluate
from metasd_runtime.training.initial import initial_weights
from metasd_runtime.training.learn import Learning, learn
from metasd_runtime.training.prompts import Prompt, load_prompts

__all__ = ["Pool", "answer_prompts", "train_pool"]

Progress = Callable[[str, int, int, str], None]
"""Told the step's name, how far it is, how far it goes, and a remark."""

OFA = "ofa"


@dataclass(frozen=True)
class Pool:
    """What training made.

    Attributes
    ----------
    path : Path
        The pool's folder.
    matrix : dict of dict of Acceptance
        By drafter, then domain, on held-out prompts.
    """

    path: Path
    matrix: dict[str, dict[str, Acceptance]]


def train_pool(config: PoolConfig, loaded: LoadedModel, out: Path, progress: Progress) -> Pool:
    """Answer, learn, evaluate, and write the pool.

    One head learns from all domains by turns; its copies then learn on, each from one domain and
    one from all (OFA), with equal budgets of tokens. So every drafter was shown as many tokens as
    the next, and they differ in what they were shown last.

    Parameters
    ----------
    out : Path
        The pool's folder; ``out/work`` holds what an interrupted run continues from.

    Raises
    ------
    ConfigError
        If `out` was begun with other settings, or a domain has nothing to train on.
    TrainingError
        If a loss is not finite.
    """
    work = out / "work"
    layers = config.head.layers or default_layers(loaded.model)
    shape = EagleShape.of(loaded.model.config, layers)
    _same_settings(work, config)
    answer_prompts(config, loaded, work / "answers", shape.layers, progress)
    corpora = {
        name: load_corpus(work / "answers", name, config.data.tokens) for name in config.domains
    }
    student = Student(config, loaded, shape, corpora)
    states = work / "states"
    texts = [corpus.train for corpus in corpora.values()]
    shared = student.new()
    student.teach(shared, "shared", texts, config.training.shared_tokens, states, progress)
    heads = {}
    for name, own in {**{n: [c.train] for n, c in corpora.items()}, OFA: texts}.items():
        heads[name] = student.copy(shared)
        student.teach(heads[name], name, own, config.training.tokens, states, progress)
    matrix = student.matrix(heads, progress)
    student.save(out, heads, matrix)
    return Pool(out, matrix)


def default_layers(model: Any) -> tuple[int, ...]:
    """The hidden states behind a third, two thirds and all of the layers."""
    n = model.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(sorted({max(1, n // 3), max(1, 2 * n // 3), n}))


def answer_prompts(
    config: PoolConfig,
    loaded: LoadedModel,
    folder: Path,
    layers: tuple[int, ...],
    progress: Progress,
) -> None:
    """Step one: let the target answer every domain's prompts."""
    data = config.data
    prompts: dict[str, Sequence[Prompt]] = {
        name: load_prompts(name, source, loaded.tokenizer, data.max_prompt_tokens)
        for name, source in config.domains.items()
    }
    context = loaded.model.config.get_text_config(decoder=True).max_position_embeddings
    if data.max_prompt_tokens + data.max_new_tokens > context:
        raise checks.ConfigError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} and data.max_new_tokens="
            f"{data.max_new_tokens} exceed the target's context of {context} together; lower one"
        )
    for name, found in prompts.items():
        if len(found) <= data.held_out:
            raise checks.ConfigError(
                f"domain {name!r} has {len(found)} prompts and {data.held_out} are to be held "
                "out: none is left to train on; lower data.held_out or add prompts"
            )
    eos = loaded.model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos]) - {None}
    answer_all(
        Answerer(loaded.model, ends, data.max_new_tokens, layers),
        prompts,
        folder,
        held_out=data.held_out,
        batch=data.batch,
        tokens=data.tokens,
        seed=config.seed,
        progress=lambda name, done: progress(f"answers: {name}", done, data.tokens, "tokens"),
    )


def _same_settings(work: Path, config: PoolConfig) -> None:
    """A work folder belongs to one configuration: results of two must not be mixed."""
    file = work / "settings.json"
    # Domains by name alone: the same files may lie elsewhere now.
    settings = json.loads(json.dumps({**config.as_dict(), "domains": sorted(config.domains)}))
    if file.exists():
        begun = json.loads(file.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if begun.get(key) != value:
                raise checks.ConfigError(
                    f"{work} was begun with {key} = {begun.get(key)!r}, and now it is {value!r}; "
                    "restore the setting, or train into another folder"
                )
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


class Student:
    """Heads of one shape and vocabulary, taught from one set of corpora."""

    def __init__(
        self,
        config: PoolConfig,
        loaded: LoadedModel,
        shape: EagleShape,
        corpora: dict[str, Corpus],
    ) -> None:
        self.config, self.loaded, self.shape, self.corpora = config, loaded, shape, corpora
        model = loaded.model
        self.embeddings = model.get_input_embeddings().weight.detach()
        output = model.get_output_embeddings().weight.detach()
        texts = [text for corpus in corpora.values() for text in corpus.train]
        size = min(config.head.vocabulary, output.shape[0])
        vocabulary, self.covered = draft_vocabulary(texts, size, output.shape[0])
        self.vocabulary = vocabulary.to(model.device)
        self.output: Tensor = output
        self.texts = texts

    def new(self) -> EagleModel:
        """A head that has learned nothing yet."""
        return self._model(initial_weights(self.loaded.model, self.shape, self.texts))

    def copy(self, head: EagleModel) -> EagleModel:
        """Another head with the same weights."""
        return self._model(head.weights())

    def _model(self, weights: dict[str, Tensor]) -> EagleModel:
        return EagleModel(self.shape, weights, self.embeddings).to(self.loaded.model.device)

    def teach(
        self,
        head: EagleModel,
        name: str,
        texts: Sequence[Sequence[Text]],
        tokens: int,
        states: Path,
        progress: Progress,
    ) -> None:
        """Show a head about `tokens` answer tokens."""
        learning: Learning = self.config.training.learning(tokens)
        learn(
            head,
            batches(texts, learning.batch_tokens, f"{self.config.seed}/{name}"),
            self.output[self.vocabulary],
            learning,
            states / f"{name}.pt",
            lambda step, steps, loss: progress(f"head: {name}", step, steps, f"loss {loss:.3f}"),
        )

    def matrix(
        self, heads: dict[str, EagleModel], progress: Progress
    ) -> dict[str, dict[str, Acceptance]]:
        """Every head on every domain's held-out answers."""
        done, total = 0, len(heads) * len(self.corpora)
        matrix: dict[str, dict[str, Acceptance]] = {}
        for name, head in heads.items():
            matrix[name] = {}
            for domain, corpus in self.corpora.items():
                matrix[name][domain] = evaluate(head, corpus.held_out, self.output, self.vocabulary)
                done += 1
                progress("evaluation", done, total, f"{name} on {domain}")
        return matrix

    def save(
        self,
        out: Path,
        heads: dict[str, EagleModel],
        matrix: dict[str, dict[str, Acceptance]],
    ) -> None:
        """Write the pool's folder."""
        about = {}
        for name in heads:
            own = [name] if name in self.corpora else list(self.corpora)
            about[f"eagle-{name}"] = {
                "domains": own,
                "metrics": {domain: vars(result) for domain, result in matrix[name].items()},
            }
        data = {
            name: {
                "texts": len(corpus.train),
                "tokens": sum(text.answered for text in corpus.train),
                "held_out": len(corpus.held_out),
            }
            for name, corpus in self.corpora.items()
        }
        settings = {**self.config.as_dict(), "domains": sorted(self.config.domains)}
        save_pool(
            out,
            self.loaded.model,
            self.loaded.name,
            self.shape,
            self.vocabulary.cpu(),
            {f"eagle-{name}": head.weights() for name, head in heads.items()},
            about,
            {"settings": settings, "data": data, "vocabulary_covers": self.covered},
        )
