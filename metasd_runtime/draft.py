"""Drafting: what a drafter is, what a draft holds, and what makes one unusable."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from metasd_runtime.sampling import Sampling

__all__ = ["Draft", "Drafter", "DrafterUnavailableError", "check_draft", "draft_block"]


class DrafterUnavailableError(RuntimeError):
    """A drafter cannot go on in this query (out of context, say); decoding does, without it."""


@dataclass
class Draft:
    """A draft block.

    Attributes
    ----------
    tokens : list of int
        At most as many as were asked for; empty means "no draft this round".
    probs : (n, vocabulary) tensor, optional
        Row j is the distribution token j was *really* drawn from, after temperature and filters.
        Under greedy decoding, where nothing is drawn, it is the drafter's own soft distribution.
        None: the drafter is deterministic, its distribution one-hot.
    owed : int
        Tokens the drafter had to catch up on before it could draft.
    switch_seconds : float
        Time spent on catching up.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    owed: int = 0
    switch_seconds: float = 0.0


class Drafter(ABC):
    """Proposes blocks of tokens. Subclass it to plug in your own; `propose` is enough.

    A drafter sees the committed tokens at every call. One that keeps state of its own (a cache,
    an index) learns of a new query by `start` and of what became of each round by `commit`,
    whether or not it was the one that drafted.

    Attributes
    ----------
    name : str
        Names the arm in traces and tables; unique within a pool.
    needs_features : bool
        Ask for the target's last hidden states in `commit`.
    """

    name: str = "custom"
    needs_features: ClassVar[bool] = False

    def clone(self) -> Drafter:
        """Another of the same, with state of its own: one for each row of a batch.

        By default a deep copy that shares the models among its attributes (and the target).
        """
        shared = {id(v): v for v in vars(self).values() if isinstance(v, nn.Module)}
        return copy.deepcopy(self, shared)

    def start(self, tokens: Sequence[int]) -> None:
        """A new query begins with this prompt."""
        return

    @abstractmethod
    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        """Propose up to n tokens to follow `tokens` (the prompt and all that was emitted).

        A drafter that samples must draw through ``sampling.propose``, or tell the distributions
        it drew from in the draft's ``probs``.

        Raises
        ------
        DrafterUnavailableError
            If it cannot go on in this query; any other exception disables it as well.
        """

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """A round ended; `tokens` is all that stands now.

        Parameters
        ----------
        features : (m, hidden) tensor, optional
            The target's last hidden state at the m tokens its cache gained in this round (the
            last of `tokens` is not among them: the target has not read it yet).
        """
        return


def draft_block(
    drafter: Drafter, tokens: Sequence[int], n: int, sampling: Sampling, vocab_size: int
) -> tuple[Draft, float]:
    """Let a drafter propose, and refuse what verification could not stay lossless with.

    Returns
    -------
    draft : Draft
    seconds : float
        Time spent drafting, catching up not counted.

    Raises
    ------
    Exception
        Whatever the drafter raised, or `ValueError` for a draft that is too long, holds a token
        outside the target's vocabulary, or tells distributions that are none.
    """
    begin = time.perf_counter()
    sampling.begin_block(len(tokens))
    draft = drafter.propose(tokens, n, sampling) if n > 0 else Draft()
    check_draft(draft, n, vocab_size, drawn=sampling.do_sample)
    return draft, time.perf_counter() - begin - draft.switch_seconds


def check_draft(draft: Draft, n: int, vocab_size: int, drawn: bool) -> None:
    """Refuse, by `ValueError`, a draft that verification could not stay lossless with."""
    if len(draft.tokens) > n:
        raise ValueError(f"{len(draft.tokens)} tokens were drafted where {n} were asked for")
    if any(not 0 <= token < vocab_size for token in draft.tokens):
        raise ValueError(f"a drafted token is outside the target's vocabulary [0, {vocab_size})")
    if draft.probs is None or not draft.tokens:
        return
    if draft.probs.shape != (len(draft.tokens), vocab_size):
        raise ValueError(
            f"the draft's probs have shape {tuple(draft.probs.shape)}, "
            f"not ({len(draft.tokens)}, {vocab_size})"
        )
    x = torch.tensor(draft.tokens, device=draft.probs.device)[:, None]
    total, chosen = draft.probs.sum(-1), draft.probs.gather(1, x)[:, 0]
    if not torch.allclose(total, torch.ones_like(total), atol=1e-3):
        raise ValueError("the draft's probs do not sum to 1 (or are NaN)")
    if drawn and not bool((chosen > 0).all()):
        raise ValueError("a drafted token has probability 0 under the draft's own probs")
