"""Step two of training: answers and hidden states as batches that a head can learn from."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.training.answers import Answer, features_path, read_answers

__all__ = ["Batch", "Corpus", "Text", "batches", "draft_vocabulary", "load_corpus", "read_texts"]


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and where its hidden states lie.

    Attributes
    ----------
    tokens : list of int
    answered : int
        How many of them, at the end, are the answer.
    file, row
        Of the hidden states.
    """

    tokens: list[int]
    answered: int
    file: Path
    row: int

    def states(self) -> tuple[Tensor, Tensor]:
        """Features (length - 1, layers x hidden), and log-normalisers (answered,)."""
        stored = _opened(self.file)
        return stored.get_tensor(f"{self.row}.features"), stored.get_tensor(f"{self.row}.log_z")


@lru_cache(maxsize=64)
def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


@dataclass(frozen=True)
class Corpus:
    """One domain's texts, for training and held out."""

    train: list[Text]
    held_out: list[Text]


def read_texts(folder: Path, domain: str) -> list[tuple[Answer, Text]]:
    """A domain's answered prompts, but for answers that are nothing but an end."""
    rows: Counter[int] = Counter()
    texts = []
    for answer in read_answers(folder / f"{domain}.jsonl"):
        row = rows[answer.batch]
        rows[answer.batch] += 1
        if len(answer.answer) >= 2:  # else it has nothing to teach
            texts.append((answer, _text(answer, features_path(folder, domain, answer.batch), row)))
    return texts


def load_corpus(folder: Path, domain: str, tokens: int) -> Corpus:
    """A domain's answered prompts, for training as many as hold `tokens` answer tokens.

    Raises
    ------
    ConfigError
        If no training text is left.
    """
    train, held_out = [], []
    room = tokens
    for answer, text in read_texts(folder, domain):
        if answer.held_out:
            held_out.append(text)
        elif room > 0:
            train.append(text)
            room -= text.answered
    if not train:
        raise checks.ConfigError(
            f"domain {domain!r} has no text left to train on: every answer was empty or held out"
        )
    return Corpus(train, held_out)


def _text(answer: Answer, file: Path, row: int) -> Text:
    return Text([*answer.prompt, *answer.answer], len(answer.answer), file, row)


def draft_vocabulary(texts: Iterable[Text], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The most frequent answer tokens, ascending, and the share of the texts they cover.

    Ties, and what is missing where the texts hold fewer kinds than `size`, go to the lowest ids.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[-text.answered :])
    size = min(size, vocab_size)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    covered = sum(counts[token] for token in ranked) / max(1, counts.total())
    return torch.tensor(sorted(ranked)), covered


@dataclass(frozen=True)
class Batch:
    """Texts side by side, aligned on the right, as pairs of (hidden states, next token).

    Pair j of a text of N tokens holds the states at token j and the id of token j + 1; it
    predicts token j + 2, whose distribution the last states of pair j + 1 give. W is the longest
    text's number of pairs, A the longest answer.

    Attributes
    ----------
    states : (B, W, layers x hidden)
    ids : (B, W + 1) int64
        The texts without their last tokens.
    valid : (B, W) bool
        False where there is padding.
    answer : (B, A) bool
        Of the last A pairs, those that predict a token of the answer.
    last : (B, A, hidden)
        The target's last hidden state one token on: with its head, the distribution to learn.
    log_z : (B, A)
    label : (B, A) int64
        The token that did follow.
    """

    states: Tensor
    ids: Tensor
    valid: Tensor
    answer: Tensor
    last: Tensor
    log_z: Tensor
    label: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text], hidden: int, device: torch.device) -> Batch:
        """Read the texts' states, of a target that is `hidden` wide, and lay them out."""
        W = max(len(text.tokens) for text in texts) - 2
        A = max(text.answered for text in texts)
        first = texts[0].states()[0]
        B = len(texts)
        batch = cls(
            states=torch.zeros(B, W, first.shape[1], dtype=first.dtype),
            ids=torch.zeros(B, W + 1, dtype=torch.long),
            valid=torch.zeros(B, W, dtype=torch.bool),
            answer=torch.zeros(B, A, dtype=torch.bool),
            last=torch.zeros(B, A, hidden, dtype=first.dtype),
            log_z=torch.zeros(B, A),
            label=torch.zeros(B, A, dtype=torch.long),
        )
        for row, text in enumerate(texts):
            features, log_z = text.states()
            ids, pairs, answered = torch.tensor(text.tokens), len(text.tokens) - 2, text.answered
            # The first token of the answer is predicted from the pair behind the prompt's
            # last token but one, which a prompt of a single token lacks.
            answered = min(answered, pairs)
            batch.states[row, W - pairs :] = features[:pairs]
            batch.ids[row, W - pairs :] = ids[:-1]
            batch.valid[row, W - pairs :] = True
            batch.answer[row, A - answered :] = True
            batch.last[row, A - answered :] = features[-answered:, -hidden:]
            batch.log_z[row, A - answered :] = log_z[-answered:]
            batch.label[row, A - answered :] = ids[-answered:]
        return cls(**{name: value.to(device) for name, value in vars(batch).items()})

    @property
    def tokens(self) -> Tensor:
        """(B, W) int64: the tokens of the pairs."""
        return self.ids[:, 1:]

    def started(self, depth: int) -> tuple[Tensor, Tensor]:
        """Answer tokens that stand at draft position `depth` (from 0) of a chain.

        A chain begins at the answer's first token at the earliest.

        Returns
        -------
        mask : (B, A) bool
        rows : (R,) int64
            Their numbers among the batch's answer tokens, in reading order.
        """
        mask = self.answer.clone()
        if depth:
            mask[:, depth:] &= self.answer[:, :-depth]
            mask[:, :depth] = False
        return mask, (self.answer.flatten().cumsum(0) - 1)[mask.flatten()]


def batches(
    domains: Sequence[Sequence[Text]], tokens: int, seed: int | str
) -> Iterator[list[Text]]:
    """Endless batches of about `tokens` answer tokens, each from one domain, the domains by turns.

    Every domain is gone through in a new random order time and again.
    """
    streams = [_shuffled(texts, f"{seed}/{i}") for i, texts in enumerate(domains)]
    while True:
        for stream in streams:
            batch: list[Text] = []
            while sum(text.answered for text in batch) < tokens:
                batch.append(next(stream))
            yield batch


def _shuffled(texts: Sequence[Text], seed: str) -> Iterator[Text]:
    order = random.Random(seed)
    while True:
        yield from order.sample(texts, len(texts))
