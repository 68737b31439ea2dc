"""Committing a round: emit what verification allows, to the first stop; roll back the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.stopping import Finish
from metasd_runtime.decoding.verify import Verdict
from metasd_runtime.model.ragged import Row
from metasd_runtime.model.target import Target

__all__ = ["Committed", "commit"]


class Committed(NamedTuple):
    """What a round added to the text.

    Attributes
    ----------
    emitted : list of int
        Accepted drafts and the target's own token, cut behind the first stop.
    finish : Finish or None
        Why the text ends here, if it does.
    """

    emitted: list[int]
    finish: Finish | None


def commit(
    tokens: list[int],
    draft: Draft,
    verdict: Verdict,
    target: Target | Row,
    stop: Callable[[Sequence[int]], Finish | None],
) -> Committed:
    """Append the round's tokens to `tokens`, one by one, and bring the target's cache in line.

    Afterwards the cache holds every token but the last, as between all rounds: of a tree the path
    that stands. `stop` says whether a text ends, and why.
    """
    before = len(tokens)
    finish = None
    for token in verdict.tokens(draft):
        tokens.append(token)
        finish = stop(tokens)
        if finish is not None:
            break
    emitted = tokens[before:]
    target.keep(len(draft.tokens) + 1, verdict.rows[: len(emitted)])
    return Committed(emitted, finish)
