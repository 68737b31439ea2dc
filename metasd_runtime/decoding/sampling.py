"""From logits to the distribution a token is drawn from, under the user's own processors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from metasd_runtime.decoding.randomness import Purpose, lane_seed, uniform

__all__ = ["Sampling", "draw", "first_maxima", "is_users_processor"]

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
# What generation settings are turned into: functions of the prefix, which may be asked about any
# text. Everything else is the user's code, which is asked only about texts that are reached.
_FROM_SETTINGS = frozenset(
    {
        *_DRAFTERS_TOO,
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TopHLogitsWarper,
    }
)

Behind = Callable[[int], Sequence[int]]


def is_users_processor(processor: object) -> bool:
    """Whether a processor is the user's code: anything but what settings are turned into."""
    return type(processor) not in _FROM_SETTINGS


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
    asks_user : bool
        Whether any processor is the user's code.
    drawn : list of (token, probs, parent)
        What `propose` and `draw_children` have drawn for the present draft, in order, each with
        the place of the one it stands behind, -1 for the text (nothing if greedy).
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
        self.drawn: list[tuple[int, Tensor, int]] = []
        self._drafters = LogitsProcessorList(p for p in self.processors if type(p) in _DRAFTERS_TOO)
        self._settings = LogitsProcessorList(
            p for p in self.processors if not is_users_processor(p)
        )
        self.asks_user = len(self._settings) < len(self.processors)

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

    def uniform(self, position: int, purpose: Purpose, sibling: int = 0) -> float:
        """The random number for a purpose at a position of the sequence."""
        return uniform(self.seed, self.row, position, purpose, 0, sibling)

    def scores(self, logits: Tensor, tokens: Sequence[int], behind: Behind) -> Tensor:
        """The target's processed scores at each position of a draft, the user's code left out.

        Parameters
        ----------
        logits : (m, vocabulary)
            Row j follows ``tokens + behind(j)``; each row's processors see just that prefix.
        tokens : sequence of int
            What is committed.
        behind : callable
            The drafted tokens before row j, as `metasd_runtime.decoding.drafter.Draft.before` tells them.
        """
        return _process(self._settings, logits, tokens, behind)

    @torch.no_grad()
    def reached(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """The target's scores behind a text that is reached, under all processors.

        Parameters
        ----------
        logits : (vocabulary,)
        text : sequence of int
            It must be reached in the end, and asked about once.
        """
        return _process(self.processors, logits[None], text, lambda j: ())[0]

    def distributions(self, logits: Tensor, tokens: Sequence[int], behind: Behind) -> Tensor:
        """A drafter's distributions, after those of the user's processors that drafters apply.

        Parameters
        ----------
        logits : (m, vocabulary)
            The drafter's; row j follows ``tokens + behind(j)``.

        Returns
        -------
        (m, vocabulary) float32 (float64 for float64 logits)
        """
        return self._drafters_scores(logits, tokens, behind).softmax(-1)

    def _drafters_scores(self, logits: Tensor, tokens: Sequence[int], behind: Behind) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision is too coarse
        return _process(self._drafters, logits.to(wide), tokens, behind)

    @property
    def shapes_drafts(self) -> bool:
        """Whether `distributions` is anything but the softmax."""
        return len(self._drafters) > 0

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
        scores = self._drafters_scores(logits[None], tokens, lambda j: ())[0]
        probs = scores.softmax(-1)
        if not self.do_sample:
            return first_maxima(scores[None])[0], probs
        u = uniform(self.seed, self.row, len(tokens), Purpose.DRAFT, self._block)
        token = draw(probs, u)
        if len(tokens) == self._block + len(self.drawn):
            self.drawn.append((token, probs, len(self.drawn) - 1))
        return token, probs

    def draw_children(
        self, probs: Tensor, position: int, k: int, parent: int = -1
    ) -> list[tuple[int, Tensor]]:
        """Draw up to k different tokens to stand side by side in a draft tree.

        Parameters
        ----------
        probs : (vocabulary,)
            The drafter's distribution at their place.
        position : int
            Their place in the sequence.
        k : int
        parent : int
            The node they stand behind, by its place among all that were drawn; -1 for the text.

        Returns
        -------
        list of (token, probs)
            Each with the distribution it was drawn from: `probs` without the tokens before it,
            so fewer than k where there are no more.
        """
        children: list[tuple[int, Tensor]] = []
        while len(children) < k:
            place = len(self.drawn)
            u = uniform(self.seed, self.row, position, Purpose.DRAFT, self._block, place)
            token = draw(probs, u)
            children.append((token, probs))
            self.drawn.append((token, probs, parent))
            rest = probs.clone()
            rest[token] = 0.0
            total = rest.sum()
            if float(total) <= 0.0:
                break
            probs = rest / total
        return children


def _process(
    processors: LogitsProcessorList, logits: Tensor, tokens: Sequence[int], behind: Behind
) -> Tensor:
    if not processors:
        return logits
    text = torch.tensor([tokens], device=logits.device)
    scores = logits
    for processor in processors:
        if type(processor) in _PREFIX_FREE:
            scores = processor(text, scores)
        else:
            rows = [
                processor(_extended(text, behind(j)), scores[j : j + 1].clone())
                for j in range(scores.shape[0])
            ]
            scores = torch.cat(rows)
    return scores


def _extended(text: Tensor, drafted: Sequence[int]) -> Tensor:
    return torch.cat([text, text.new_tensor([drafted])], 1) if drafted else text
