"""Lookahead: n-grams that the target itself guesses in parallel (Fu et al. 2024)."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.draft import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.hf import cache_argument, cache_of
from metasd_runtime.sampling import Sampling
from metasd_runtime.target import Target

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
    read by the target behind the text in one forward, each place attending to the text and to
    its own past (equations and figures 2 to 4 of the paper). That gives a new guess for every
    place, an n-gram for the pool along each place's past, and the target's own next token,
    with which the draft begins; the pool continues it.

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
    """

    name = "lookahead"

    def __init__(self, target: Target, level: int = 5, window: int = 7, guesses: int = 7) -> None:
        self.level = checks.integer("level", level, 2)
        self.window = checks.integer("window", window, 1)
        self.guesses = checks.integer("guesses", guesses, 1)
        self._target = target
        self._places = _places(self.level - 1, self.window)
        self._sees = _sees(self.level - 1, self.window)
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
        if limit is not None and len(tokens) + max(self._places) > limit:
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

    @torch.inference_mode()
    def _guess(self, block: list[int]) -> list[int]:
        """The target's first maximum behind each token of the block; its storage stays."""
        model, before = self._target.model, self._target.length
        device = self._target.device
        sees = self._sees[: len(block), : len(block)]
        seen = torch.cat([torch.ones(len(block), before, dtype=torch.bool), sees], 1)
        mask = torch.zeros(seen.shape, dtype=model.dtype)
        mask.masked_fill_(~seen, torch.finfo(model.dtype).min)
        cache = {cache_argument(model): cache_of(self._target.layers)}
        try:
            logits: Tensor = model(
                input_ids=torch.tensor([block], device=device),
                attention_mask=mask[None, None].to(device),
                position_ids=torch.tensor([self._places[: len(block)]], device=device) + before,
                use_cache=True,
                **cache,
            ).logits[0]
        finally:
            for layer in self._target.layers:
                layer.length = before
        return logits.argmax(-1).tolist()


def _places(rows: int, window: int) -> list[int]:
    """Each token's place behind the last: the last itself, then row by row, older rows first."""
    return [0, *(1 + row + column for row in range(rows) for column in range(window))]


def _sees(rows: int, window: int) -> Tensor:
    """(1 + rows x window, the same) bool: which tokens of the block each attends to.

    A guess sees the text's last token, the oldest row up to its own column, and its column's
    guesses in the rows between: consecutive places, whoever guessed them.
    """
    size = 1 + rows * window
    sees = torch.zeros(size, size, dtype=torch.bool)
    sees[:, 0] = True
    for row in range(rows):
        for column in range(window):
            own = 1 + row * window + column
            sees[own, 1 : 2 + column] = True
            sees[own, [1 + r * window + column for r in range(row + 1)]] = True
    return sees
