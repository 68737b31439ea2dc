"""The kinds of drafters that can be trained: what each begins with, and how it is taught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from metasd_runtime.drafters.eagle.head import EagleShape
from metasd_runtime.drafters.parallel_heads import ParallelShape
from metasd_runtime.drafters.small_lm import SmallShape
from metasd_runtime.training.config import RATES, PoolConfig
from metasd_runtime.training.corpus import Text
from metasd_runtime.training.eagle_model import EagleModel
from metasd_runtime.training.initialise import initial_weights
from metasd_runtime.training.learn import Learning
from metasd_runtime.training.lm_model import LmModel, initial_lm
from metasd_runtime.training.parallel_model import ParallelModel, initial_parallel
from metasd_runtime.training.student import Student

__all__ = ["beginner", "learning_of", "student_of"]


def beginner(
    kind: str, config: PoolConfig, model: Any, layers: tuple[int, ...], texts: Sequence[Text]
) -> Student:
    """A drafter of a kind that has learned nothing yet; `layers` are the hidden states kept."""
    shape: Any
    if kind == "eagle":
        shape = EagleShape.of(model.config, layers)
        weights = initial_weights(model, shape, texts)
    elif kind == "language-model":
        width, depth = config.language_model.width, config.language_model.depth
        shape = SmallShape.of(model.config, width, depth)
        weights = initial_lm(model, shape, texts)
    else:
        hidden = model.get_input_embeddings().weight.shape[1]
        shape = ParallelShape(kind, layers[-1], hidden, config.head.positions)
        weights = initial_parallel(shape, texts)
    return student_of(shape, weights, model)


def student_of(shape: Any, weights: dict[str, Tensor], model: Any) -> Student:
    """A drafter in training with these weights, where the target is."""
    embeddings = model.get_input_embeddings().weight.detach()
    student: Student
    if isinstance(shape, EagleShape):
        student = EagleModel(shape, weights, embeddings)
    elif isinstance(shape, SmallShape):
        student = LmModel(shape, weights, embeddings)
    else:
        student = ParallelModel(shape, weights)
    return student.to(model.device)


def learning_of(kind: str, config: PoolConfig, tokens: int) -> Learning:
    """How a drafter of a kind learns from a budget of `tokens`.

    EAGLE is unrolled as deep as configured, parallel heads learn all their positions, and a
    language model, which reads its own drafts like any text, just the next token.
    """
    depths = {"eagle": config.training.depths, "language-model": 1}
    training = config.training
    rate = RATES[kind] if training.rate is None else training.rate
    return Learning(tokens, training.batch_tokens, rate, depths.get(kind, config.head.positions))
