"""Rescored heads: the likeliest path through the heads' best tokens, by a language model as well.

Parallel heads guess every position without seeing the others' guesses, so the best token of each
need not make sense together. Their best k tokens a position span a lattice of k^n blocks; a small
n-gram model knows which of them read well (R-BPD: Kim et al. 2024, "Exploring and Improving Drafts
in Blockwise Parallel Decoding"; the same with Medusa's heads: R-Medusa).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.parallel_heads import ParallelHeads

__all__ = ["CANDIDATES", "WEIGHT", "Rescored", "best_path"]

CANDIDATES, WEIGHT = 4, 0.5


def best_path(
    log_q: Tensor, tokens: Tensor, model: NGram, context: Sequence[int], weight: float
) -> list[int]:
    """The block that maximises the sum of log q_j(x_j) + weight log p(x_j | what stands before).

    Exact (Viterbi): of paths that end in the same order - 1 tokens only the best can win.

    Parameters
    ----------
    log_q, tokens : (n, k)
        Each position's candidates, the likeliest first.
    context : sequence of int
        The text before the block.
    """
    memory = model.order - 1
    before = tuple(context[max(0, len(context) - memory) :]) if memory else ()
    paths: dict[tuple[int, ...], tuple[float, list[int]]] = {before: (0.0, [])}
    for scores, choices in zip(log_q.tolist(), tokens.tolist(), strict=True):
        longer: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        for state, (value, path) in paths.items():
            language = model.log_probs(state, choices)
            for token, own, other in zip(choices, scores, language, strict=True):
                total = value + own + weight * other
                end = (*state, token)[-memory:] if memory else ()
                if end not in longer or total > longer[end][0]:
                    longer[end] = (total, [*path, token])
        paths = longer
    return max(paths.values(), key=lambda scored: scored[0])[1]


class Rescored(Drafter):
    """Parallel heads whose block is chosen together with an n-gram model.

    The n-gram model knows the texts it was made from and learns the present one as it grows.
    The block is a function of what stands (nothing is drawn), so its distribution is one-hot:
    under sampling a draft is accepted with the target's own probability of it.

    Parameters
    ----------
    heads : ParallelHeads
        Its weights are shared; its state is not.
    model : NGram
        Of earlier texts.
    name : str, default "r-" and the heads' name
    candidates : int, default 4
        Tokens of each position among which the path is sought, k.
    weight : float, default 0.5
        Of the n-gram model's logarithms beside the heads'.
    """

    def __init__(
        self,
        heads: ParallelHeads,
        model: NGram,
        name: str | None = None,
        candidates: int = CANDIDATES,
        weight: float = WEIGHT,
    ) -> None:
        self.name = f"r-{heads.name}" if name is None else name
        self.candidates = checks.integer("candidates", candidates, 1)
        self.weight = checks.number("weight", weight, 0.0)
        self.needs_features = heads.needs_features
        self._heads = copy.copy(heads)
        self._known = model
        self.start(())

    def clone(self) -> Rescored:
        """Another over the same weights and texts."""
        return Rescored(self._heads.clone(), self._known, self.name, self.candidates, self.weight)

    def start(self, tokens: Sequence[int]) -> None:
        self._heads.start(tokens)
        self._model = NGram(self._known.vocab_size, self._known.order, self._known)
        self._counted = 0
        self._count(tokens)

    def commit(self, tokens: Sequence[int], features: Tensor | None = None) -> None:
        self._heads.commit(tokens, features)
        self._count(tokens)

    def _count(self, tokens: Sequence[int]) -> None:
        self._model.extend(tokens, self._counted)
        self._counted = len(tokens)

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        logits = self._heads.logits(tokens)[:n]
        if not len(logits):
            return Draft()
        k = min(self.candidates, logits.shape[1])
        log_q, best = logits.log_softmax(-1).topk(k)
        chosen = self._heads.tokens[best]
        return Draft(best_path(log_q, chosen, self._model, tokens, self.weight))
