"""Drafters with another tokenizer: any small model can serve any target.

Two ways across, both lossless because verification is told what the drafts were really drawn from.
*Shared tokens*: the small model drafts only tokens that both vocabularies spell alike; its
distribution is restricted to them and renormalised, and that is what is drawn from. *Text*: it
drafts greedily in its own tokens, and the target's tokenizer reads the text; such a draft is a
function of what stands, so its distribution is one-hot. (The idea: universal assisted generation,
Timor et al. 2025.)
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.autoregressive import refuse_beyond
from metasd_runtime.model.target import CachedModel

__all__ = ["ForeignModel", "SharedTokens", "TextMatch", "shared_tokens"]

_SPACES = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece spell a leading space


def shared_tokens(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> dict[int, int]:
    """Ids of tokens that two vocabularies spell alike: theirs -> ours. Special tokens are not."""
    special = {*ours.all_special_tokens, *theirs.all_special_tokens}
    spelled = {_plain(token): i for token, i in ours.get_vocab().items() if token not in special}
    return {
        i: spelled[_plain(token)]
        for token, i in theirs.get_vocab().items()
        if token not in special and _plain(token) in spelled
    }


def _plain(token: str) -> str:
    for space in _SPACES:
        token = token.replace(space, " ")
    return token


class ForeignModel(Drafter):
    """A language model that reads the text through a tokenizer of its own.

    Before it drafts, the text is tokenized anew; of its cache it keeps what both readings share.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM.
    tokenizer, target_tokenizer : PreTrainedTokenizerBase
        The model's own, and the target's.
    vocab_size : int
        Width of the target's logits.
    name : str
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        name: str,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.lm = CachedModel(model)
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.start(())

    def clone(self) -> ForeignModel:
        return type(self)(
            self.lm.model, self.tokenizer, self.target_tokenizer, self.vocab_size, self.name
        )

    def start(self, tokens: Sequence[int]) -> None:
        self.lm.reset()
        self._read: list[int] = []
        self._drafts = self._drafted = False  # in this round, in the one before

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._drafted, self._drafts = self._drafts, False

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        begin = time.perf_counter()
        text = self.target_tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        reading = self.tokenizer.encode(text, add_special_tokens=False)
        if not reading:
            return Draft()
        refuse_beyond(self.lm.max_length, len(reading) + n)
        unread = self._turn_to(reading)
        logits = self._forward(unread)
        owed = max(0, len(unread) - 1 - self._drafted)  # as `Reading.owed`
        catching_up = (time.perf_counter() - begin) * owed / len(unread)
        self._drafts = True
        draft = self.draft_behind(tokens, n, sampling, logits)
        draft.owed, draft.switch_seconds = owed, catching_up
        return draft

    @abstractmethod
    def draft_behind(
        self, tokens: Sequence[int], n: int, sampling: Sampling, logits: Tensor
    ) -> Draft:
        """Draft up to n of the target's tokens; `logits` are the model's for what comes next."""

    def _turn_to(self, reading: list[int]) -> list[int]:
        """Forget where the cache differs from a reading; what is still to be read of it."""
        same = 0
        while same < min(len(self._read), len(reading) - 1) and self._read[same] == reading[same]:
            same += 1
        self.lm.rollback(len(self._read) - same)
        del self._read[same:]
        return reading[same:]

    def _forward(self, tokens: list[int]) -> Tensor:
        logits = self.lm.forward(tokens, keep=1).logits[-1]
        self._read += tokens
        return logits


class SharedTokens(ForeignModel):
    """Draft the tokens that both vocabularies spell alike.

    Raises
    ------
    ConfigError
        If the vocabularies share no token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        name: str = "lm-tokens",
    ) -> None:
        super().__init__(model, tokenizer, target_tokenizer, vocab_size, name)
        pairs = [
            (theirs, ours)
            for theirs, ours in sorted(shared_tokens(target_tokenizer, tokenizer).items())
            if theirs < self.lm.vocab_size and ours < vocab_size
        ]
        if not pairs:
            raise checks.ConfigError(
                f"drafter {name!r} shares no token with the target; draft by text instead (lm-text)"
            )
        self._theirs, self._ours = torch.tensor(pairs, device=self.lm.device).T
        self._back = {ours: theirs for theirs, ours in pairs}

    def draft_behind(
        self, tokens: Sequence[int], n: int, sampling: Sampling, logits: Tensor
    ) -> Draft:
        text, rows = list(tokens), list[Tensor]()
        for j in range(n):
            if j:
                logits = self._forward([self._back[text[-1]]])
            token, probs = sampling.propose(self._restricted(logits), text)
            text.append(token)
            rows.append(probs)
            if not sampling.confident(token, probs):
                break
        return Draft(text[len(tokens) :], torch.stack(rows))

    def _restricted(self, logits: Tensor) -> Tensor:
        """The model's logits over the target's vocabulary: of shared tokens alone."""
        restricted = logits.new_full((self.vocab_size,), float("-inf"))
        restricted[self._ours] = logits[self._theirs]
        return restricted


class TextMatch(ForeignModel):
    """Draft text greedily; the target's tokenizer says which of its tokens that is.

    A text that the target's tokenizer would cut across the seam with what stands is read from
    the seam on. The last token may be half a word, and is then rejected like any other.
    """

    seam = 8  # tokens before the seam that are read along, so that it is cut as in running text

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        name: str = "lm-text",
    ) -> None:
        super().__init__(model, tokenizer, target_tokenizer, vocab_size, name)

    def draft_behind(
        self, tokens: Sequence[int], n: int, sampling: Sampling, logits: Tensor
    ) -> Draft:
        special, context = set(self.tokenizer.all_special_ids), self._read[-self.seam :]
        drafted: list[int] = []
        for j in range(n):
            if j:
                logits = self._forward(drafted[-1:])
            token = int(logits.argmax())
            if token in special:
                break
            drafted.append(token)
        return Draft(self._as_ours(tokens, context, drafted)[:n])

    def _as_ours(self, tokens: Sequence[int], context: list[int], drafted: list[int]) -> list[int]:
        """The drafted text, behind its context, in the target's tokens."""
        text = self._text(self.tokenizer, [*context, *drafted])
        known = self._text(self.tokenizer, context)
        if not text.startswith(known) or text == known:
            return []
        new = text[len(known) :]
        tail = list(tokens[-self.seam :])
        before = self._text(self.target_tokenizer, tail)
        whole = self.target_tokenizer.encode(before + new, add_special_tokens=False)
        if whole[: len(tail)] == tail:
            ids = whole[len(tail) :]
        else:
            ids = self.target_tokenizer.encode(new, add_special_tokens=False)
        return [i for i in ids if i < self.vocab_size]

    @staticmethod
    def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
