"""Lookahead: n-grams that the target itself guesses in parallel (Fu et al. 2024)."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.model.target import Target

__all__ = ["GuessPool", "Lookahead"]


class GuessPool:
    """The latest n-grams seen behind each token.

    Parameters
    ----------
    size : int
        Most n-grams kept for a token (G); an older one makes room for a newer.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._guesses: dict[int, deque[tuple[int, ...]]] = {}

    def add(self, token: int, guess: tuple[int, ...]) -> None:
        """Note that `guess` may follow `token`."""
        guesses = self._guesses.setdefault(token, deque(maxlen=self.size))
        if guess in guesses:
            guesses.remove(guess)
        guesses.append(guess)

    def follow(self, token: int) -> list[int]:
        """What most of the token's n-grams say, token by token; the latest decides a tie."""
        guesses = list(self._guesses.get(token, ()))[::-1]
        path: list[int] = []
        while guesses and len(path) < len(guesses[0]):
            votes = Counter(guess[len(path)] for guess in guesses)
            path.append(max(votes, key=lambda token: votes[token]))
            guesses = [guess for guess in guesses if guess[len(path) - 1] == path[-1]]
        return path


class Lookahead(Drafter):
    """Draft from n-grams that come out of Jacobi iteration with the target.

    A window of W places in the future, each with its guesses of the last N - 1 iterations, is
    read by the target behind the text in one forward, as a tree: each guess sees the text, the
    oldest guesses up to its own column, and its column's guesses since (section 3 of the paper).
    That gives a new guess for every column, an n-gram for the pool down each column, and the
    target's own next token, with which the draft begins; the pool continues it.

    The original fuses this forward with the verification of up to G n-grams. Here verification
    is the decoder's, the same for all drafters, so a round of Lookahead costs two forwards, the
    first of which counts as drafting; and a draft is one chain, for which the G n-grams vote.
    It is deterministic given the rounds before: its distribution is one-hot.

    The target's storage is left as it was. In batches, whose rows are stored elsewhere, it is
    disabled with a warning.

    Parameters
    ----------
    target : Target
    level, window, guesses : int
        N, W and G of the paper; N is at least 2.

    Raises
    ------
    ConfigError
        If the target cannot read a tree of tokens in one forward.
    """

    name = "lookahead"

    def __init__(self, target: Target, level: int = 5, window: int = 7, guesses: int = 7) -> None:
        self.level = checks.integer("level", level, 2)
        self.window = checks.integer("window", window, 1)
        self.guesses = checks.integer("guesses", guesses, 1)
        self._target = target
        target.refuse_trees()
        self._parents = _parents(self.level - 1, self.window)
        self.start([0])

    def start(self, tokens: Sequence[int]) -> None:
        draws = random.Random(0)
        self._pool = GuessPool(self.guesses)
        # The first guesses are tokens of the prompt, as in the original; rows come one by one.
        self._rows = [draws.choices(tokens, k=self.window)]

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        if self._target.length != len(tokens) - 1:
            raise DrafterUnavailableError("it needs the target's storage to hold the text")
        limit = self._target.max_length
        if limit is not None and len(tokens) + self.window + self.level - 2 > limit:
            raise DrafterUnavailableError(f"the target's context ends at {limit} tokens")
        draft = [self._look_ahead(tokens[-1])]
        while len(draft) < n and (more := self._pool.follow(draft[-1])):
            draft += more
        return Draft(draft[:n])

    def _look_ahead(self, last: int) -> int:
        """One iteration of the window; the target's own next token."""
        best = self._guess([last, *(token for row in self._rows for token in row)])
        self._rows.append(best[-self.window :])
        if len(self._rows) == self.level:
            for first, *rest in zip(*self._rows, strict=True):
                self._pool.add(first, tuple(rest))
            del self._rows[0]
        return best[0]

    def _guess(self, block: list[int]) -> list[int]:
        """The target's first maximum behind each token of the block; its storage stays."""
        target, before = self._target, self._target.length
        try:
            logits = target.forward(block, parents=self._parents[: len(block) - 1]).logits
        finally:  # layer by layer: an interrupted forward leaves them at different lengths
            for layer in target.layers:
                layer.length = before
        return logits.argmax(-1).tolist()


def _parents(rows: int, window: int) -> list[int]:
    """The window as a tree, row by row: whom each guess comes right behind.

    The oldest row is a chain behind the text; below each of its guesses hang those that the
    later iterations made of its column: consecutive places, whoever guessed them.
    """
    oldest = range(-1, window - 1)
    return [*oldest, *range((rows - 1) * window)]
