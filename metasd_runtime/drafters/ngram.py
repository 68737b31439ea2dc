"""A small n-gram language model that goes on learning from the text it is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from metasd_bandits import checks

__all__ = ["NGram"]


class _Followers:
    """How often each token was seen behind a context, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, begin: _Followers | None) -> None:
        self.counts: dict[int, int] = {} if begin is None else dict(begin.counts)
        self.total: int = 0 if begin is None else begin.total

    def add(self, token: int) -> None:
        self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1


class NGram:
    """Interpolated n-gram probabilities over token ids (Witten and Bell 1991).

    With c(h x) the times token x was seen behind the context h, c(h) their sum and T(h) the
    number of different tokens seen there,

        p(x | h) = (c(h x) + T(h) p(x | h')) / (c(h) + T(h)),

    h' being h without its first token, and p uniform where no context is left.

    Parameters
    ----------
    vocab_size : int
    order : int, default 3
        Tokens of the longest n-grams.
    base : NGram, optional
        What it begins with, a model without a base of its own; it stays as it is.

    Examples
    --------
    >>> model = NGram(vocab_size=4, order=2)
    >>> model.extend([1, 2, 1, 2, 1, 3], 0)
    >>> [round(math.exp(x), 3) for x in model.log_probs([2, 1], [0, 1, 2, 3])]
    [0.033, 0.167, 0.522, 0.278]
    """

    def __init__(self, vocab_size: int, order: int = 3, base: NGram | None = None) -> None:
        self.vocab_size = vocab_size
        self.order = checks.integer("order", order, 1)
        self._base: dict[tuple[int, ...], _Followers] = base._contexts if base else {}
        self._contexts: dict[tuple[int, ...], _Followers] = {}

    @classmethod
    def of(cls, vocab_size: int, documents: Iterable[Sequence[int]]) -> NGram:
        """A model of some texts."""
        model = cls(vocab_size)
        for document in documents:
            model.extend(document, 0)
        return model

    def extend(self, text: Sequence[int], begin: int) -> None:
        """Count the tokens of `text` from `begin` on, each behind what stands before it."""
        for end in range(begin, len(text)):
            for n in range(min(self.order - 1, end) + 1):
                context = tuple(text[end - n : end])
                if context not in self._contexts:
                    self._contexts[context] = _Followers(self._base.get(context))
                self._contexts[context].add(text[end])

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Natural logarithms of p(x | context) for each x among `tokens`."""
        probs = [1.0 / self.vocab_size] * len(tokens)
        for n in range(min(self.order - 1, len(context)) + 1):
            key = tuple(context[len(context) - n :])
            followers = self._contexts.get(key) or self._base.get(key)
            if followers is None:
                break
            counts, kinds = followers.counts, len(followers.counts)
            total = followers.total + kinds
            probs = [
                (counts.get(token, 0) + kinds * p) / total
                for token, p in zip(tokens, probs, strict=True)
            ]
        return [math.log(p) for p in probs]
