"""Early exit: the target's own first layers, its final norm and its head, as a drafter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from metasd_bandits import checks
from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.model.attention import own_attention
from metasd_runtime.model.target import CachedModel, Target

__all__ = ["EarlyExit"]


class EarlyExit(Drafter):
    """Draft with the first L layers of the target (LayerSkip's idea, without its training).

    It has no weights and no cache of its own: for tokens that stand, the target's first L layers
    have computed the same keys and values already, so the draft is written behind them and
    rolled back before verification. It never owes a token.

    Parameters
    ----------
    target : Target
    layers : int
        L, in [1, number of the target's layers - 1].
    """

    def __init__(self, target: Target, layers: int) -> None:
        n_layers = len(target.layers)
        self.layers = checks.integer("early-exit layers", layers, 1, n_layers - 1)
        self.name = f"early-exit:{layers}"
        self._target = target
        self.model = _first_layers(target.model, layers)
        self._exit = CachedModel(self.model, target.layers[:layers])

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling) -> Draft:
        limit = self._exit.max_length
        if limit is not None and len(tokens) + n > limit:
            raise DrafterUnavailableError(f"the target's context ends at {limit} tokens")
        before = self._exit.length
        text, drafted, rows = list(tokens), list[int](), list[torch.Tensor]()
        try:
            for _ in range(n):
                logits = self._exit.forward(text[-1:]).logits[0]
                token, probs = sampling.propose(logits, text)
                text.append(token)
                drafted.append(token)
                rows.append(probs)
                if not sampling.confident(token, probs):
                    break
        finally:
            for layer in self._exit.layers:  # the target's storage: leave it as it was
                layer.length = before
        return Draft(drafted, torch.stack(rows))


def _first_layers(model: PreTrainedModel, n: int) -> PreTrainedModel:
    """The same model, parameters shared, cut behind its first n layers.

    Raises
    ------
    ValueError
        If the model does not keep its decoder layers in one list, as nearly all do.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text._attn_implementation_internal = own_attention(text)
    text.num_hidden_layers = n
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:n]
    shallow = module = _shallow_copy(model)
    *path, layers = _path_to_layers(model, total)
    for name in path:
        module._modules[name] = module = _shallow_copy(module._modules[name])
        if hasattr(module, "config"):
            module.config = text
    module._modules[layers] = module._modules[layers][:n]
    shallow.config = config
    return shallow


def _path_to_layers(model: nn.Module, total: int) -> list[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return name.split(".")
    raise ValueError(
        f"{type(model).__name__} keeps its {total} layers in no single list, so early exit cannot "
        "cut it; leave early-exit out of the drafters"
    )


def _shallow_copy(module: Any) -> Any:
    """The same module and parameters, with a child table that can be changed on its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
