"""What a head begins with: the target's last layer, and a linear guess at what goes into it.

The head's layer is the target's last one. What it should be fed is the residual stream that the
target feeds it, one token on; ridge regression from the states and embedding that the head has
gives the best linear guess. On the default target that alone takes the cross-entropy at the first
draft position from 22 to 3.5, and no amount of training within reach made up for its lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metasd_bandits import checks
from metasd_runtime.drafters.eagle.head import MATRICES, NORMS, EagleShape, normalise
from metasd_runtime.training.corpus import Text

__all__ = ["initial_weights", "ridge"]

_ROWS = 20_000
_RIDGE = 0.01


@torch.inference_mode()
def initial_weights(model: Any, shape: EagleShape, texts: Sequence[Text]) -> dict[str, Tensor]:
    """Weights to begin with, from the target and some twenty thousand tokens of the texts.

    The residual stream of the last layer is brought to unit scale: its norms do not notice, and
    its outputs are divided by as much.

    Raises
    ------
    ConfigError
        If the target's layers are not Llama's kind.
    """
    w = _last_layer(model)
    rows = _regression_rows(model, shape, texts)
    scale = rows.stream.square().mean(-1).sqrt().median()
    w["o"], w["down"] = w["o"] / scale, w["down"] / scale
    stream, width = rows.stream / scale, shape.hidden * len(shape.layers)
    both = ridge(rows.inputs, stream)
    w["fuse"], w["embed"] = both[:, :width], both[:, width:]
    # Behind the text the head's own output is all there is; the target's last state is its ideal.
    own = normalise(rows.last / w["norm"].sign() / w["norm"].abs().clamp(min=1e-3), shape.eps)
    w["chain"] = ridge(own, stream - rows.inputs[:, width:] @ w["embed"].T)
    assert w.keys() == {*MATRICES, *NORMS}
    return {name: value.clone().contiguous() for name, value in w.items()}


def _last_layer(model: Any) -> dict[str, Tensor]:
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    }
    layer = model.base_model.layers[-1]
    there = {name for name, _ in layer.named_parameters()}
    wanted = {f"{name}.weight" for name in names.values()}
    if there != wanted:
        raise checks.ConfigError(
            f"{type(model).__name__} has layers with {', '.join(sorted(there ^ wanted))}; an EAGLE "
            "head begins with the target's last layer, which must be of Llama's kind"
        )
    w = {key: layer.get_parameter(f"{name}.weight") for key, name in names.items()}
    w["norm"] = model.base_model.norm.weight
    return {key: value.float().cpu() for key, value in w.items()}


class _Rows(NamedTuple):
    """For pairs (states at a token, the next token), what the head has and what it should make.

    Attributes
    ----------
    inputs : (n, layers x hidden + hidden)
        Normalised states and embedding, as the head fuses them.
    last : (n, hidden)
        The target's last state at the token.
    stream : (n, hidden)
        What enters the target's last layer one token on.
    """

    inputs: Tensor
    last: Tensor
    stream: Tensor


def _regression_rows(model: Any, shape: EagleShape, texts: Sequence[Text]) -> _Rows:
    """Rows from texts spread evenly over all of them."""
    blocks: list[_Rows] = []
    mean = sum(len(text.tokens) for text in texts) / len(texts)
    every = max(1, int(len(texts) * mean / _ROWS))
    for text in texts[::every]:
        ids = torch.tensor([text.tokens], device=model.device)
        states = model.base_model(input_ids=ids, output_hidden_states=True).hidden_states
        fused = [normalise(states[layer][0, :-1], shape.eps) for layer in shape.layers]
        embedded = normalise(model.get_input_embeddings()(ids[0, 1:]), shape.eps)
        block = _Rows(
            torch.cat([*fused, embedded], -1), states[-1][0, :-1].float(), states[-2][0, 1:].float()
        )
        blocks.append(_Rows(*(part.cpu() for part in block)))
    return _Rows(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """(outputs, inputs): the matrix W that makes x @ W.T closest to y, lightly shrunk."""
    gram = x.T @ x
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram, x.T @ y).T
