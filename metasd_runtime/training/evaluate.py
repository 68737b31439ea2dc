"""Step four of training: how well each head drafts each domain's held-out answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_runtime.drafters.draft_head import with_prompt
from metasd_runtime.training.corpus import Batch, Text
from metasd_runtime.training.eagle_model import EagleModel
from metasd_runtime.training.learn import half, model_logits, target_probabilities

__all__ = ["Acceptance", "evaluate"]


@dataclass(frozen=True)
class Acceptance:
    """A head on texts that the target wrote greedily.

    Attributes
    ----------
    agreement : list of float
        For draft positions 1 to N: share of tokens that are the target's, given that the drafts
        before them were.
    divergence : list of float
        For each draft position, the mean of 1 - TV between target and head along the text.
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
    model: EagleModel, texts: Sequence[Text], output: Tensor, vocabulary: Tensor, depths: int = 5
) -> Acceptance:
    """Follow each text as greedy decoding would, from the unrolled head's outputs.

    While drafts are accepted they are the text's own tokens, so one unrolled pass gives every
    block that decoding could draft.

    Parameters
    ----------
    output : (target's vocabulary, hidden)
        The target's output head.
    vocabulary : (V,) int64
        The tokens that can be drafted, besides those of each prompt.
    """
    matches, overlaps, rounds, emitted = [], [], 0, 0
    for text in texts:
        batch = Batch.of([text], len(model.shape.layers), output.device)
        allowed = with_prompt(vocabulary, text.tokens[: -text.answered])
        head = output[allowed]
        p = target_probabilities(batch, head)
        label = batch.label[batch.answer]
        match = torch.zeros(depths, len(label) + depths, dtype=torch.bool)
        overlap = torch.full((depths, len(label)), float("nan"))
        with half(output.device):
            unrolled = model(batch, depths)
        for depth, (out, rows) in enumerate(unrolled):
            logits = model_logits(model, out, head)
            match[depth, rows] = allowed[logits.argmax(-1)] == label[rows]
            overlap[depth, rows] = torch.minimum(logits.softmax(-1), p[rows]).sum(-1)
        matches.append(match[:, : len(label)])
        overlaps.append(overlap)
        steps, tokens = _decode(match, len(label))
        rounds, emitted = rounds + steps, emitted + tokens
    divergence = torch.cat(overlaps, 1).nanmean(1).tolist()
    return Acceptance(_conditional(matches), divergence, emitted / max(1, rounds))


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
