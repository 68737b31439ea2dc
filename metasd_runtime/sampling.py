"""From logits to the distribution a token is drawn from, under the user's own processors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from metasd_runtime.randomness import Purpose, lane_seed, uniform

__all__ = ["Sampling", "draw", "first_maxima"]

# These look at the scores alone, so a block's positions can go through them together. (Just these:
# a subclass may look at the text as well.)
_PREFIX_FREE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
# A drafter that applies these too resembles the target more; anything else (a grammar, a user's
# own processor with state) is the target's alone. Either is lossless: q is what was drawn from.
_DRAFTERS_TOO = (*_PREFIX_FREE, RepetitionPenaltyLogitsProcessor)


def draw(probs: Tensor, u: float) -> int:
    """The token at quantile u of a distribution over the vocabulary.

    Parameters
    ----------
    probs : (vocabulary,)
        Need not be normalised; float64 sums keep the tail honest.
    u : float
        In [0, 1).

    Raises
    ------
    ValueError
        If the probabilities sum to 0, or hold NaN or infinity.
    """
    cumulative = probs.double().cumsum(0)
    total = float(cumulative[-1])
    if not 0.0 < total < math.inf:
        raise ValueError(f"no distribution to draw from: the probabilities sum to {total}")
    token = int(torch.searchsorted(cumulative, u * total, right=True))
    if token >= probs.shape[0] or probs[token] <= 0:  # rounding at the very end of the range
        token = int(torch.nonzero(probs)[-1])
    return token


def first_maxima(scores: Tensor) -> list[int]:
    """The token of the highest score in each row, the first of several.

    Parameters
    ----------
    scores : (n, vocabulary)
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return scores.detach().numpy().argmax(-1).tolist()  # a tenth of the time of torch's own
    return scores.argmax(-1).tolist()


class Sampling:
    """How tokens are chosen in one query: greedy or drawn, and under which processors.

    Parameters
    ----------
    processors : LogitsProcessorList
        The user's processors, in Hugging Face's order.
    do_sample : bool
        Draw from the processed distribution, or take its first maximum.
    seed, row : int
        Key of the random numbers.
    draft_threshold : float
        In [0, 1): a drafter stops behind the token at which the product of its own probabilities
        for what it drafted falls below this; 0 always drafts the full length.

    Attributes
    ----------
    drawn : list of (token, probs)
        What `propose` has drawn for the present block, in order (nothing if greedy).
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        seed: int = 0,
        row: int = 0,
        draft_threshold: float = 0.0,
    ) -> None:
        self.processors = processors if processors is not None else LogitsProcessorList()
        self.do_sample = do_sample
        self.seed = seed
        self.row = row
        self.draft_threshold = draft_threshold
        self._confidence = 1.0
        self._block = 0
        self.drawn: list[tuple[int, Tensor]] = []
        self._drafters = LogitsProcessorList(p for p in self.processors if type(p) in _DRAFTERS_TOO)

    def begin_block(self, position: int) -> None:
        """A block is about to be drafted, its first token at `position`.

        A position behind a rejected draft is drafted again in a later round, and which drafter
        does it depends (through block divergence) on what was drafted there before. So draft
        numbers are keyed by the block as well: reusing them would tie the new draft to the
        choice of its drafter, and the output would no longer follow the target.
        """
        self._block = position
        self._confidence = 1.0
        self.drawn = []

    def confident(self, token: int, probs: Tensor) -> bool:
        """Whether to go on drafting behind a token that was drawn from `probs`.

        The block's length then depends on what was drafted, and the output stays the target's
        all the same: whatever is drafted is verified, and the token behind the block is drawn
        from the target with a number that drafting never saw (docs/generate.md).
        """
        if self.draft_threshold <= 0.0:
            return True
        self._confidence *= float(probs[token])
        return self._confidence >= self.draft_threshold

    def lane(self, *key: int) -> Sampling:
        """The same choice of tokens under random numbers independent of this one's.

        Parameters
        ----------
        *key : int
            Tells one lane from another.
        """
        other = copy.copy(self)
        other.seed = lane_seed(self.seed, self.row, key)
        return other

    def uniform(self, position: int, purpose: Purpose) -> float:
        """The random number for a purpose at a position of the sequence."""
        return uniform(self.seed, self.row, position, purpose)

    def scores(self, logits: Tensor, tokens: Sequence[int], draft: Sequence[int]) -> Tensor:
        """The target's processed scores at each position of a block.

        Parameters
        ----------
        logits : (n + 1, vocabulary)
            Row j follows ``tokens + draft[:j]``; each row's processors see just that prefix.
        tokens, draft : sequence of int
            What is committed, and the n drafted tokens behind it.
        """
        return _process(self.processors, logits, tokens, draft)

    def propose(self, logits: Tensor, tokens: Sequence[int]) -> tuple[int, Tensor]:
        """Choose one draft token from a drafter's logits.

        Parameters
        ----------
        logits : (vocabulary,)
            The drafter's, for the token that follows `tokens`.

        Returns
        -------
        token : int
        probs : (vocabulary,) float32 (float64 for float64 logits)
            The very distribution the token was drawn from (for a greedy token, the drafter's own
            soft distribution, which block divergence compares with the target's).
        """
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision is too coarse
        scores = _process(self._drafters, logits[None].to(wide), tokens, ())
        probs = scores[0].softmax(-1)
        if not self.do_sample:
            return first_maxima(scores)[0], probs
        u = uniform(self.seed, self.row, len(tokens), Purpose.DRAFT, self._block)
        token = draw(probs, u)
        if len(tokens) == self._block + len(self.drawn):
            self.drawn.append((token, probs))
        return token, probs


def _process(
    processors: LogitsProcessorList, logits: Tensor, tokens: Sequence[int], draft: Sequence[int]
) -> Tensor:
    if not processors:
        return logits
    ids = torch.tensor([[*tokens, *draft]], device=logits.device)
    scores = logits
    for processor in processors:
        if type(processor) in _PREFIX_FREE:
            scores = processor(ids, scores)
        else:
            rows = [
                processor(ids[:, : len(tokens) + j], scores[j : j + 1].clone())
                for j in range(scores.shape[0])
            ]
            scores = torch.cat(rows)
    return scores
