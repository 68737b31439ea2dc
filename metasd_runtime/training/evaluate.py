"""Step four of training: how well each drafter drafts each domain's held-out answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_runtime.drafters.ngram import NGram
from metasd_runtime.drafters.output_head import with_prompt
from metasd_runtime.drafters.rescored import CANDIDATES, WEIGHT, best_path
from metasd_runtime.training.corpus import Batch, Text
from metasd_runtime.training.learn import half, target_probabilities
from metasd_runtime.training.student import Student

__all__ = ["Acceptance", "evaluate"]


@dataclass(frozen=True)
class Acceptance:
    """A drafter on texts that the target wrote greedily.

    Attributes
    ----------
    agreement : list of float
        For draft positions 1 to N: share of tokens that are the target's, given that the drafts
        before them were.
    divergence : list of float
        For each draft position, the mean of 1 - TV between target and drafter along the text.
    tokens_per_round : float
        Emitted a round by greedy decoding with chains of N, the target's own token included.
    """

    agreement: list[float]
    divergence: list[float]
    tokens_per_round: float

    @property
    def block_divergence(self) -> float:
        """The mean of `divergence` over the block."""
        return sum(self.divergence) / len(self.divergence)


@torch.inference_mode()
def evaluate(
    model: Student,
    texts: Sequence[Text],
    output: Tensor,
    vocabulary: Tensor,
    depths: int = 5,
    rescorer: NGram | None = None,
) -> Acceptance:
    """Follow each text as greedy decoding would, from the drafter's outputs along it.

    While drafts are accepted they are the text's own tokens, so one pass over the text gives
    every block that decoding could draft.

    Parameters
    ----------
    output : (target's vocabulary, hidden)
        The target's output head.
    vocabulary : (V,) int64
        The tokens that can be drafted, besides those of each prompt where the drafter can.
    rescorer : NGram, optional
        Chooses the blocks together with the drafter, as `metasd_runtime.drafters.rescored` does.
    """
    matches, overlaps, rounds, emitted = [], [], 0, 0
    for text in texts:
        batch = Batch.of([text], model.hidden, output.device)
        prompt = text.tokens[: -text.answered]
        allowed = with_prompt(vocabulary, prompt) if model.drafts_prompt else vocabulary
        head = output[allowed]
        p = target_probabilities(batch, head)
        label = batch.label[batch.answer]
        with half(output.device):
            drafted = [(model.logits(out, head), rows) for out, rows in model(batch, depths)]
        if rescorer is None:
            match, overlap = _own(drafted, p, allowed, label, depths)
        else:
            match, overlap = _rescored(drafted, p, allowed, text, rescorer, depths)
        matches.append(match[:, : len(label)])
        overlaps.append(overlap)
        steps, tokens = _decode(match, len(label))
        rounds, emitted = rounds + steps, emitted + tokens
    divergence = torch.cat(overlaps, 1).nanmean(1).nan_to_num().tolist()
    return Acceptance(_conditional(matches), divergence, emitted / max(1, rounds))


def _blank(depths: int, length: int) -> tuple[Tensor, Tensor]:
    """Match and overlap before anything is drafted, by draft position and token of the text."""
    match = torch.zeros(depths, length + depths, dtype=torch.bool)
    return match, torch.full((depths, length), float("nan"))


def _own(
    drafted: Sequence[tuple[Tensor, Tensor]],
    p: Tensor,
    allowed: Tensor,
    label: Tensor,
    depths: int,
) -> tuple[Tensor, Tensor]:
    """Where the likeliest token of each position is the text's, and 1 - TV there."""
    match, overlap = _blank(depths, len(label))
    for depth, (logits, rows) in enumerate(drafted):
        match[depth, rows] = allowed[logits.argmax(-1)] == label[rows]
        overlap[depth, rows] = torch.minimum(logits.softmax(-1), p[rows]).sum(-1)
    return match, overlap


def _rescored(
    drafted: Sequence[tuple[Tensor, Tensor]],
    p: Tensor,
    allowed: Tensor,
    text: Text,
    rescorer: NGram,
    depths: int,
) -> tuple[Tensor, Tensor]:
    """The same for the block that `best_path` chooses at each token of the answer."""
    answered = len(p)
    match, overlap = _blank(depths, answered)
    best = [logits.log_softmax(-1).topk(CANDIDATES) for logits, _ in drafted]
    model = NGram(rescorer.vocab_size, rescorer.order, rescorer)
    counted = 0
    for begin in range(answered):
        known = text.tokens[: len(text.tokens) - answered + begin]
        model.extend(known, counted)
        counted = len(known)
        reach = best[: answered - begin]
        # Row `begin` of the first position stands `depth` rows on at each further one.
        log_q = torch.stack([top.values[begin] for top in reach])
        column = torch.stack([top.indices[begin] for top in reach])
        path = best_path(log_q, allowed[column], model, known, WEIGHT)
        for depth, token in enumerate(path):
            match[depth, begin + depth] = token == text.tokens[len(known) + depth]
            at = (allowed[column[depth]] == token).nonzero()[0, 0]
            overlap[depth, begin + depth] = p[begin + depth, column[depth, at]]
    return match, overlap


def _decode(match: Tensor, length: int) -> tuple[int, int]:
    """Rounds that greedy decoding needs for a text, and the tokens it emits."""
    at = rounds = 0
    depths = match.shape[0]
    while at < length:
        accepted = 0
        while accepted < depths and match[accepted, at + accepted]:
            accepted += 1
        at += accepted + 1
        rounds += 1
    return rounds, length


def _conditional(matches: Sequence[Tensor]) -> list[float]:
    """Agreement at each position of the blocks that begin at every token, given what is before."""
    depths = matches[0].shape[0]
    tried, hit = [0] * depths, [0] * depths
    for match in matches:
        alive = torch.ones(match.shape[1], dtype=torch.bool)
        for depth in range(min(depths, match.shape[1])):
            alive = alive[: match.shape[1] - depth]
            right = match[depth, depth:]
            tried[depth] += int(alive.sum())
            alive = alive & right
            hit[depth] += int(alive.sum())
    return [h / t if t else 0.0 for h, t in zip(hit, tried, strict=True)]
