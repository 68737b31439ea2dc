"""Training a pool from start to end; every step continues where an earlier run stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.pool import Rescoring, Trained, as_stored, save_pool
from metasd_runtime.model.load import LoadedModel
from metasd_runtime.training.answers import Answerer, answer_all, ends_of
from metasd_runtime.training.config import PoolConfig
from metasd_runtime.training.corpus import (
    Corpus,
    Text,
    batches,
    draft_vocabulary,
    load_corpus,
)
from metasd_runtime.training.evaluate import Acceptance, evaluate
from metasd_runtime.training.kinds import beginner, learning_of, student_of
from metasd_runtime.training.learn import learn
from metasd_runtime.training.prompts import Prompt, load_prompts
from metasd_runtime.training.student import Student

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

    Of every kind, one drafter learns from all domains by turns; its copies then learn on, each
    from one domain and one from all (OFA), with equal budgets of tokens. So every drafter was
    shown as many tokens as the next, and they differ in what they were shown last.

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
    layers = kept_layers(config, loaded.model)
    _same_settings(work, config)
    answer_prompts(config, loaded, work / "answers", layers, progress)
    corpora = {
        name: load_corpus(work / "answers", name, config.data.tokens) for name in config.domains
    }
    school = School(config, loaded, layers, corpora)
    students: dict[str, Student] = {}
    for kind in config.kinds:
        if not kind.startswith("r-"):
            students |= school.train(kind, work / "states", progress)
    matrix = school.matrix(students, progress)
    school.save(out, students, matrix)
    return Pool(out, matrix)


def kept_layers(config: PoolConfig, model: Any) -> tuple[int, ...]:
    """The hidden states that are kept beside the answers.

    Raises
    ------
    ConfigError
        If the layers do not ascend to the last, with which the target speaks.
    """
    layers = config.head.layers or default_layers(model)
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    for layer in layers:
        checks.integer("head.layers", layer, 1, last)
    if layers[-1] != last or list(layers) != sorted({*layers}):
        raise checks.ConfigError(
            f"head.layers={list(layers)} must ascend to {last}, the target's last, whose hidden "
            "state tells what the target would have said"
        )
    return layers


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
    answer_all(
        Answerer(loaded.model, ends_of(loaded.model), data.max_new_tokens, layers),
        prompts,
        folder,
        held_out=data.held_out,
        batch=data.batch,
        tokens=data.tokens,
        seed=config.seed,
        progress=lambda name, done: progress(f"answers: {name}", done, data.tokens, "tokens"),
    )


def _same_settings(work: Path, config: PoolConfig) -> None:
    """A work folder belongs to one configuration: results of two must not be mixed.

    A setting that there was not when the folder was begun had then its default.
    """
    file = work / "settings.json"
    # Domains by name alone: the same files may lie elsewhere now.
    settings, usual = (
        json.loads(json.dumps({**each.as_dict(), "domains": sorted(config.domains)}))
        for each in (config, PoolConfig(config.target, config.domains))
    )
    if file.exists():
        begun = json.loads(file.read_text(encoding="utf-8"))
        for key, value in settings.items():
            then = begun.get(key, usual[key])
            if isinstance(then, dict):
                then = usual[key] | then
            if then != value:
                raise checks.ConfigError(
                    f"{work} was begun with {key} = {then!r}, and now it is {value!r}; "
                    "restore the setting, or train into another folder"
                )
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


class School:
    """Drafters for one target and draft vocabulary, taught from one set of corpora."""

    def __init__(
        self,
        config: PoolConfig,
        loaded: LoadedModel,
        layers: tuple[int, ...],
        corpora: dict[str, Corpus],
    ) -> None:
        self.config, self.loaded, self.layers, self.corpora = config, loaded, layers, corpora
        self.output: Tensor = loaded.model.get_output_embeddings().weight.detach()
        self.texts = [text for corpus in corpora.values() for text in corpus.train]
        size = min(config.head.vocabulary, self.output.shape[0])
        vocabulary, self.covered = draft_vocabulary(self.texts, size, self.output.shape[0])
        self.vocabulary = vocabulary.to(loaded.model.device)

    @property
    def parts(self) -> tuple[str, ...]:
        """What drafters of each kind there are for: the domains, and all of them (OFA)."""
        return (*self.corpora, OFA) if self.config.training.specialists else (OFA,)

    def train(self, kind: str, states: Path, progress: Progress) -> dict[str, Student]:
        """A drafter of one kind for every domain, and one for all."""
        model = self.loaded.model
        everything = [corpus.train for corpus in self.corpora.values()]
        shared = beginner(kind, self.config, model, self.layers, self.texts)
        budget = self.config.training.shared_tokens
        self._teach(shared, kind, "shared", everything, budget, states, progress)
        students = {}
        for name in self.parts:
            texts = everything if name == OFA else [self.corpora[name].train]
            student = student_of(shared.shape, shared.weights(), model)
            budget = self.config.training.tokens
            self._teach(student, kind, name, texts, budget, states, progress)
            students[f"{kind}-{name}"] = student
        return students

    def _teach(
        self,
        student: Student,
        kind: str,
        name: str,
        texts: Sequence[Sequence[Text]],
        tokens: int,
        states: Path,
        progress: Progress,
    ) -> None:
        """Show a drafter about `tokens` answer tokens."""
        learning = learning_of(kind, self.config, tokens)
        learn(
            student,
            batches(texts, learning.batch_tokens, f"{self.config.seed}/{name}"),
            self.output[self.vocabulary],
            learning,
            states / f"{kind}-{name}.pt",
            lambda step, steps, loss: progress(f"{kind}: {name}", step, steps, f"loss {loss:.3f}"),
        )

    def members(self) -> list[_Member]:
        """All drafters of the pool, kind by kind."""
        return [_Member(kind, part) for kind in self.config.kinds for part in self.parts]

    def matrix(
        self, students: dict[str, Student], progress: Progress
    ) -> dict[str, dict[str, Acceptance]]:
        """Every drafter, as the pool will hold it, on every domain's held-out answers."""
        done, total = 0, len(self.members()) * len(self.corpora)
        matrix: dict[str, dict[str, Acceptance]] = {}
        members = self.members()
        trained = {m.heads: self._trained(m, students[m.heads], {}) for m in members}
        for member in members:
            shape = students[member.heads].shape
            student = student_of(shape, as_stored(trained, member.heads), self.loaded.model)
            ngram = self._ngram(member) if member.rescored else None
            matrix[member.name] = {}
            for domain, corpus in self.corpora.items():
                matrix[member.name][domain] = evaluate(
                    student, corpus.held_out, self.output, self.vocabulary, rescorer=ngram
                )
                done += 1
                progress("evaluation", done, total, f"{member.name} on {domain}")
        return matrix

    def _domains(self, member: _Member) -> list[str]:
        return list(self.corpora) if member.part == OFA else [member.part]

    def _answers(self, domain: str) -> list[list[int]]:
        return [text.tokens[-text.answered :] for text in self.corpora[domain].train]

    def _ngram(self, member: _Member) -> NGram:
        answers = [answer for domain in self._domains(member) for answer in self._answers(domain)]
        return NGram.of(self.output.shape[0], answers)

    def _trained(self, member: _Member, student: Student, about: Mapping[str, Any]) -> Trained:
        """For the pool: a specialist's weights lie beside those for all domains."""
        kind = member.kind.removeprefix("r-")
        base = None if member.part == OFA else f"{kind}-{OFA}"
        return Trained(kind, student.shape, student.weights(), about, base)

    def save(
        self,
        out: Path,
        students: dict[str, Student],
        matrix: dict[str, dict[str, Acceptance]],
    ) -> None:
        """Write the pool's folder."""
        drafters: dict[str, Trained | Rescoring] = {}
        for member in self.members():
            metrics = {domain: vars(result) for domain, result in matrix[member.name].items()}
            about = {"domains": self._domains(member), "metrics": metrics}
            student = students[member.heads]
            drafters[member.name] = (
                Rescoring(member.heads, self._domains(member), about)
                if member.rescored
                else self._trained(member, student, about)
            )
        data = {
            name: {
                "texts": len(corpus.train),
                "tokens": sum(text.answered for text in corpus.train),
                "held_out": len(corpus.held_out),
            }
            for name, corpus in self.corpora.items()
        }
        rescored = any(member.rescored for member in self.members())
        settings = {**self.config.as_dict(), "domains": sorted(self.config.domains)}
        save_pool(
            out,
            self.loaded.model,
            self.loaded.name,
            self.vocabulary.cpu(),
            drafters,
            {domain: self._answers(domain) for domain in self.corpora} if rescored else {},
            {"settings": settings, "data": data, "vocabulary_covers": self.covered},
        )


@dataclass(frozen=True)
class _Member:
    """One drafter of the pool: its kind, and the domain it is for, or OFA."""

    kind: str
    part: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.part}"

    @property
    def rescored(self) -> bool:
        return self.kind.startswith("r-")

    @property
    def heads(self) -> str:
        """The drafter whose weights it uses: itself, unless it rescores another's."""
        return f"{self.kind.removeprefix('r-')}-{self.part}"
