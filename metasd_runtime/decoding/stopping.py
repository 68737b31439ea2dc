"""Stopping, checked for every emitted token, in order: nothing behind a stop is ever delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

__all__ = ["Finish", "Stopping", "is_users_criterion"]

_FROM_SETTINGS = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


def is_users_criterion(criterion: object) -> bool:
    """Whether a stopping criterion is the user's code."""
    return type(criterion) not in _FROM_SETTINGS


class Finish(StrEnum):
    """Why a query ended."""

    EOS = "eos"
    LENGTH = "length"
    CONTEXT = "context"
    CRITERIA = "criteria"
    INTERRUPTED = "interrupted"


class Stopping:
    """The stops of one query.

    Parameters
    ----------
    max_length : int
        Most tokens of prompt and output together.
    context : int or None
        Most tokens the target can take.
    eos : set of int
        Each ends the text, and is delivered as its last token.
    criteria : StoppingCriteriaList
        Stop strings, time limits and the user's own, as Hugging Face defines them.

    Attributes
    ----------
    scores_seen : callable, optional
        Number of tokens -> the scores that criteria are shown with them; None shows none.
    """

    def __init__(
        self,
        max_length: int,
        context: int | None = None,
        eos: frozenset[int] = frozenset(),
        criteria: StoppingCriteriaList | None = None,
    ) -> None:
        self.max_length = max_length
        self.context = context
        self.eos = eos
        self.criteria = criteria if criteria is not None else StoppingCriteriaList()
        self.scores_seen: Callable[[int], tuple[Tensor, ...] | None] | None = None

    def room(self, length: int) -> int:
        """Tokens that may still be emitted after `length`."""
        limit = self.max_length if self.context is None else min(self.max_length, self.context)
        return max(0, limit - length)

    @property
    def asks_user(self) -> bool:
        """Whether any criterion is the user's code."""
        return any(map(is_users_criterion, self.criteria))

    def after(self, tokens: Sequence[int]) -> Finish | None:
        """Whether the text ends with the last of `tokens`, and why.

        Criteria are asked at every call, as in Hugging Face, whatever else ends the text.
        """
        met = bool(self.criteria) and self._criteria_met(tokens)
        if tokens[-1] in self.eos:
            return Finish.EOS
        if met:
            return Finish.CRITERIA
        if len(tokens) >= self.max_length:
            return Finish.LENGTH
        if self.context is not None and len(tokens) >= self.context:
            return Finish.CONTEXT
        return None

    @torch.no_grad()
    def _criteria_met(self, tokens: Sequence[int]) -> bool:
        ids = torch.tensor([tokens])
        scores = None if self.scores_seen is None else self.scores_seen(len(tokens))
        return bool(torch.as_tensor(self.criteria(ids, scores)).any())
