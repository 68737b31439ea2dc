"""One draft under verification: the user's code is asked about texts that are reached, no others.

Plain decoding asks the user's processors about a text, chooses a token, and asks the stopping
criteria about the longer text; it knows no others. A draft's rows are texts that may never come to
be. So they are scored without the user's code first, and each again, under it, once verification
has accepted the draft before it and the criteria have let the text go on. Rows that verification
does not reach keep the scores they have; these count in block divergence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from metasd_runtime.decoding.drafter import Draft
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.decoding.scores import Scores
from metasd_runtime.decoding.stopping import Finish, Stopping
from metasd_runtime.decoding.verify import Verdict, verify

__all__ = ["Judged"]


class Judged:
    """One draft of a query under verification.

    Parameters
    ----------
    draft : Draft
        n tokens.
    logits : (n + 1, vocabulary)
        The target's; row 0 follows the text, row j + 1 follows draft j.
    tokens : sequence of int
        The text.
    sampling, stopping, kept
        The query's.

    Attributes
    ----------
    scores : (n + 1, vocabulary)
        Processed; those of reached rows under the user's code as well.
    known : dict of tuple of int to (vocabulary,) tensor
        The scores of each reached row, by the drafted tokens before it; empty where no processor
        is the user's.
    verdict : Verdict
    """

    def __init__(
        self,
        draft: Draft,
        logits: Tensor,
        tokens: Sequence[int],
        sampling: Sampling,
        stopping: Stopping,
        kept: Scores,
    ) -> None:
        self._draft, self._logits, self._tokens = draft, logits, list(tokens)
        self._sampling, self._stopping, self._kept = sampling, stopping, kept
        self._finishes: dict[int, Finish | None] = {}
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.scores = sampling.scores(logits, tokens, draft.before)
        if sampling.asks_user:
            self.scores = self.scores.clone()  # it may be the logits themselves
        reach = self._reach if sampling.asks_user else None
        self.verdict: Verdict = verify(draft, self.scores, len(tokens), sampling, reach)
        kept.see(logits, self.scores, self.verdict.rows)

    def stop(self, tokens: Sequence[int]) -> Finish | None:
        """Whether the text ends with the last of `tokens`, and why; criteria are asked once."""
        n = len(tokens)
        if n not in self._finishes:
            self._finishes[n] = self._stopping.after(tokens)
        return self._finishes[n]

    def _reach(self, row: int) -> bool:
        """Verification has come to a row: score it under the user's code, if the text goes on."""
        drafted = self._draft.before(row)
        text = [*self._tokens, *drafted]
        if drafted:
            passed = [0, *(node + 1 for node in self._draft.path(row - 1)[:-1])]
            self._kept.see(self._logits, self.scores, passed)
            if self.stop(text) is not None:
                return False
        self.scores[row] = self._sampling.reached(self._logits[row], text)
        self.known[tuple(drafted)] = self.scores[row]
        return True
