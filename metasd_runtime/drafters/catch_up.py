"""What a drafter has read of a text, and how it pays for what it has not: cache strategies.

While other drafters are chosen, a drafter with a cache falls behind; chosen again, it owes
tokens (MetaSD, Table 13). Its cache holds a *view* of the text: the tokens before a gap, then
those behind it. Positions are those inside the cache, not in the text, so that the model never
sees one beyond its context, however long the text is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from metasd_bandits import checks

__all__ = [
    "CACHE_STRATEGIES",
    "CacheStrategy",
    "Gap",
    "Lazy",
    "Reading",
    "Recompute",
    "Streaming",
    "make_cache_strategy",
]


class Gap(NamedTuple):
    """Text positions ``[start, end)`` that a view leaves out; none where they are equal."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


_WHOLE = Gap(0, 0)


class CacheStrategy(ABC):
    """Which view of the text a drafter reads before it drafts."""

    name: ClassVar[str]

    @abstractmethod
    def gap(self, read: int, present: Gap, length: int, n: int) -> Gap:
        """The gap of the next view.

        Parameters
        ----------
        read : int
            Tokens in the cache.
        present : Gap
            The gap of the view they are.
        length, n : int
            Tokens of the text, and of the block to be drafted behind it.
        """

    def fit(self, context: int | None) -> CacheStrategy:
        """The strategy for a model of that context (None: no limit is known)."""
        return self


@dataclass(frozen=True)
class Recompute(CacheStrategy):
    """Read everything that was missed. A text longer than the model's context disables it."""

    name = "recompute"

    def gap(self, read: int, present: Gap, length: int, n: int) -> Gap:
        return _WHOLE


@dataclass(frozen=True)
class Streaming(CacheStrategy):
    """Attention sinks and a recent window (StreamingLLM, Xiao et al. 2023): bounded memory.

    When the view outgrows the window, its older half is dropped and what remains of it is read
    anew at its new positions, which costs one token read per token of text and holds for every
    kind of position (shifting rotated keys in place would hold for some). The window is between
    half and whole full.

    Parameters
    ----------
    sinks : int, default 4
        First tokens of the text that always stay.
    window : int, default 1024
        Most tokens behind them, drafts included; cut to the model's context.
    """

    name = "streaming"
    sinks: int = 4
    window: int = 1024

    def __post_init__(self) -> None:
        checks.integer("sinks", self.sinks, 0)
        checks.integer("window", self.window, 4)

    def gap(self, read: int, present: Gap, length: int, n: int) -> Gap:
        if length - present.size + n <= self.sinks + self.window:
            return present
        end = max(self.sinks, length - max(1, min(self.window // 2, self.window - n)))
        return Gap(self.sinks, end)

    def fit(self, context: int | None) -> CacheStrategy:
        if context is None or self.sinks + self.window <= context:
            return self
        if context - self.sinks < 4:
            raise checks.ConfigError(
                f"sinks={self.sinks} leave no window in a context of {context} tokens; "
                f"give {max(0, context - 4)} at most"
            )
        return Streaming(self.sinks, context - self.sinks)


@dataclass(frozen=True)
class Lazy(CacheStrategy):
    """Pay a large debt only when chosen twice (ours).

    Chosen once since it fell behind, the drafter reads just the last tokens, as if they followed
    what it had read before; the debt stays. Chosen again, it reads everything it missed. A
    policy that tries an arm and leaves it again then pays for `window` tokens, not for the text.

    Parameters
    ----------
    window : int, default 64
        Debts up to this many tokens are paid at once; tokens read when lazy.
    """

    name = "lazy"
    window: int = 64

    def __post_init__(self) -> None:
        checks.integer("window", self.window, 1)

    def gap(self, read: int, present: Gap, length: int, n: int) -> Gap:
        if present.size or length - read <= self.window:
            return _WHOLE
        return Gap(read, length - self.window)


CACHE_STRATEGIES: dict[str, type[CacheStrategy]] = {
    cls.name: cls for cls in (Recompute, Streaming, Lazy)
}


def make_cache_strategy(
    cache: str | CacheStrategy, parameters: Mapping[str, int] | None = None
) -> CacheStrategy:
    """A strategy from its name and parameters, or the object itself.

    Examples
    --------
    >>> make_cache_strategy("streaming", {"window": 256})
    Streaming(sinks=4, window=256)
    """
    if isinstance(cache, CacheStrategy):
        return cache
    cls = CACHE_STRATEGIES[checks.choice("cache strategy", cache, CACHE_STRATEGIES)]
    known = list(getattr(cls, "__annotations__", ()))
    for name in parameters or {}:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameter"
            raise checks.ConfigError(f"cache={cache} has no parameter {name!r}; it {takes}")
    return cls(**(parameters or {}))


class Reading:
    """One row's cache as a list of tokens: what to forget and what to read before a draft.

    Attributes
    ----------
    tokens : list of int
        What the cache holds: a view of the text, then drafts.
    owed : int
        Of the tokens that the last plan says to read, those that are a debt: all but the text's
        last, which every draft begins with, and, where the drafter drafted in the round before as
        well, but the one it had not read itself of a block that was accepted whole.
    """

    def __init__(self, strategy: CacheStrategy) -> None:
        self.strategy = strategy
        self.restart()

    def restart(self) -> None:
        """A new text begins; the cache is empty."""
        self.tokens: list[int] = []
        self.owed = 0
        self._drafts = self._drafted = False  # in this round, in the one before
        self._gap = _WHOLE
        self._stands = 0  # leading tokens known to be the text's

    def plan(self, text: Sequence[int], n: int) -> tuple[int, list[int]]:
        """What to forget and what to read, so that the cache ends with the text's last token.

        Returns
        -------
        forget : int
            Last tokens of the cache to roll back.
        unread : list of int
            Tokens to read then, at least one.
        """
        forget = self.settle(text)
        new = self.strategy.gap(len(self.tokens), self._gap, len(text), n)
        limits = [len(self.tokens), len(text) - new.size - 1]
        if new != self._gap:
            limits += [gap.start for gap in (self._gap, new) if gap.size]
        keep = min(limits)
        forget += self._cut(keep)
        self._gap = new
        if keep < new.start:
            unread = [*text[keep : new.start], *text[new.end :]]
        else:
            unread = list(text[keep + new.size :])
        self._drafts = True
        self.owed = max(0, len(unread) - 1 - self._drafted)
        return forget, unread

    def end_round(self, text: Sequence[int]) -> int:
        """A round ended, and this is the text now; as `settle`."""
        self._drafted, self._drafts = self._drafts, False
        return self.settle(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """The cache has read these too."""
        self.tokens += tokens

    def settle(self, text: Sequence[int]) -> int:
        """Keep of the cache what the text, as it stands now, agrees with; how many go."""
        stands, gap = self._stands, self._gap
        while stands < len(self.tokens):
            place = stands if stands < gap.start else stands + gap.size
            if place >= len(text) or self.tokens[stands] != text[place]:
                break
            stands += 1
        return self._cut(stands)

    def _cut(self, keep: int) -> int:
        forgotten = len(self.tokens) - keep
        del self.tokens[keep:]
        self._stands = keep
        return forgotten
