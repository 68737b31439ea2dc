"""The small language model as it is distilled from the target, and what it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import LlamaModel

from metasd_bandits import checks
from metasd_runtime.drafters.small_lm import SmallShape
from metasd_runtime.training.corpus import Batch, Text
from metasd_runtime.training.initialise import ridge
from metasd_runtime.training.student import Student, Unrolled

__all__ = ["LmModel", "initial_lm"]

_ROWS = 20_000


class LmModel(Student):
    """A small language model with trainable weights in float32.

    Parameters
    ----------
    shape : SmallShape
    weights : dict of str to tensor
    embeddings : (vocabulary, hidden)
        The target's, not trained.
    """

    drafts_prompt = False
    embeddings: Tensor

    def __init__(self, shape: SmallShape, weights: dict[str, Tensor], embeddings: Tensor) -> None:
        super().__init__()
        self.shape: SmallShape = shape
        self.hidden = shape.hidden
        self.body = LlamaModel(shape.config())
        del self.body.embed_tokens  # it is given embeddings
        self.body.load_state_dict(
            {name: value for name, value in weights.items() if name not in ("embed", "output")}
        )
        self.embed = nn.Parameter(weights["embed"].detach().float().clone())
        self.output = nn.Parameter(weights["output"].detach().float().clone())
        self.register_buffer("embeddings", embeddings, persistent=False)

    def weights(self) -> dict[str, Tensor]:
        named = {"embed": self.embed, "output": self.output, **dict(self.body.named_parameters())}
        return {name: value.detach().clone() for name, value in named.items()}

    def forward(self, batch: Batch, depths: int) -> list[Unrolled]:
        """Behind accepted drafts it has read the text itself: every position has the same."""
        out = linear(self.read(batch), self.output)
        return [Unrolled(out[rows], rows) for rows in (batch.started(d)[1] for d in range(depths))]

    def read(self, batch: Batch) -> Tensor:
        """(answer tokens, width): its last states where it predicts the answers' tokens."""
        A, W = batch.answer.shape[1], batch.ids.shape[1]
        valid = pad(batch.valid, (0, 1), value=True)
        column = torch.arange(W, device=batch.ids.device)
        seen = (column <= column[:, None]) & valid[:, None]
        seen |= column == column[:, None]  # padding sees itself, lest nothing be seen
        mask = torch.zeros(seen.shape, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        states: Tensor = self.body(
            inputs_embeds=linear(self.embeddings[batch.ids].float(), self.embed),
            attention_mask=mask[:, None],
            position_ids=(valid.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return states[:, -A:][batch.answer]


@torch.no_grad()
def initial_lm(model: Any, shape: SmallShape, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Weights to begin with.

    Of the target's width, the layers are copies of its first ones. A narrower model sees the
    principal components of the embeddings, and its layers write nothing yet. Either way the
    output matrix is the ridge regression of the target's last states from what the model has:
    for the narrower one that makes it the best bigram model of its rank.
    """
    embeddings = model.get_input_embeddings().weight.detach().float()
    weights = _layers(model, shape)
    weights["output"] = torch.zeros(shape.hidden, shape.width)
    if shape.width == shape.hidden:
        weights["embed"] = torch.eye(shape.hidden)
    else:
        centred = embeddings - embeddings.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
        weights["embed"] = (vectors / values.clamp(min=1e-6).sqrt()).T[-shape.width :].cpu()
    student = LmModel(shape, weights, embeddings).to(embeddings.device)
    every = max(1, sum(text.answered for text in texts) // _ROWS)
    batches = [Batch.of([text], shape.hidden, embeddings.device) for text in texts[::every]]
    states = torch.cat([student.read(batch) for batch in batches]).cpu()
    targets = torch.cat([batch.last[batch.answer].float() for batch in batches]).cpu()
    weights["output"] = ridge(states, targets)
    return weights


def _layers(model: Any, shape: SmallShape) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    own = dict(model.base_model.named_parameters())
    weights = {}
    for name, size in shape.sizes().items():
        if name in ("embed", "output"):
            continue
        if len(size) == 1:
            weights[name] = torch.ones(size)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros(size)
        else:
            weights[name] = torch.randn(size, generator=draws) * shape.width**-0.5
        if shape.width == shape.hidden and name.startswith("layers."):
            if name not in own or own[name].shape != size:
                raise checks.ConfigError(
                    f"{type(model).__name__} has no {name} of shape {size}, so a language model "
                    "cannot begin with its layers; give a smaller language_model.width"
                )
            weights[name] = own[name].detach().float().cpu().clone()
    return weights
