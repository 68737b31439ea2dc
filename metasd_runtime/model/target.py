"""The target: a causal language model with a cache that rolls back in O(1)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metasd_runtime.model.attention import GROUPED, attending, can_attend
from metasd_runtime.model.hf import (
    PreallocatedLayer,
    cache_argument,
    cache_of,
    new_layers,
    output_width,
    refuse_stateful,
    unwrapped,
)
from metasd_runtime.model.masks import Masks, refuse_other_logits
from metasd_runtime.model.tree import Block, moves

if TYPE_CHECKING:
    from metasd_runtime.model.compiled import CompiledForward

__all__ = ["CachedModel", "Forward", "Target", "refuse_trees"]

_PREFILL_CHUNK = 512
_FIRST_CAPACITY = 256


class Forward(NamedTuple):
    """What one forward gives at each position of a block of n tokens.

    Attributes
    ----------
    logits : (n, vocabulary) float32
        For the token that follows each position.
    features : (n, layers x hidden) or None
        The hidden states that were asked for, at each position, side by side.
    """

    logits: Tensor
    features: Tensor | None

    def features_at(self, places: Sequence[int]) -> Tensor | None:
        """The features at some places of the block."""
        return None if self.features is None else self.features[places]


class CachedModel:
    """A causal LM and the tokens its cache holds; forward extends them, `rollback` forgets.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM whose layers are all attention.
    layers : list of PreallocatedLayer, optional
        Shared storage (early exit drafts in the target's own first layers).

    Attributes
    ----------
    vocab_size : int
        Width of the logits (padded vocabularies included).
    forwards : int
        Forwards so far.
    compiled : CompiledForward or None
        Runs blocks of the sizes it was compiled for.
    """

    def __init__(
        self, model: PreTrainedModel, layers: list[PreallocatedLayer] | None = None
    ) -> None:
        model = unwrapped(model)
        refuse_stateful(model)
        self.model = model
        self.layers = new_layers(model, _FIRST_CAPACITY) if layers is None else layers
        self._cache = cache_of(self.layers)
        self._cache_argument = cache_argument(model)
        self.device: torch.device = model.device  # looked up once: a model searches its weights
        self.vocab_size = output_width(model)
        self.forwards = 0
        self.compiled: CompiledForward | None = None
        self._grouped = can_attend(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedModel:
        """Another cache of the same model, empty: a drafter's clone shares the weights."""
        return CachedModel(self.model)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.layers[0].length

    @property
    def max_length(self) -> int | None:
        """Most positions the model can take, or None where its config names no limit."""
        return getattr(
            self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )

    def reset(self) -> None:
        """Forget every token; the storage stays."""
        for layer in self.layers:
            layer.reset()  # one by one: an interrupted forward leaves them at different lengths

    def rollback(self, n: int) -> None:
        """Forget the last n tokens, O(1)."""
        for layer in self.layers:
            layer.length -= n

    @torch.inference_mode()
    def keep(self, n: int, places: Sequence[int]) -> None:
        """Of the last n tokens keep those at `places`, ascending, and forget the others.

        O(1) where they are the first; else what is kept is moved together.
        """
        start = self.length - n
        to, source = moves(places)
        if source:
            positions = torch.tensor(source, device=self.device) + start
            for layer in self.layers:
                layer.move(positions, start + to)
        self.rollback(n - len(places))

    @cached_property
    def _masks(self) -> Masks:
        masks = Masks(self.model)
        refuse_trees(self.model)
        return masks

    def refuse_trees(self) -> None:
        """Refuse a model that cannot read a tree of tokens in one forward (`ConfigError`)."""
        assert self._masks

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        keep: int = 0,
        features: Sequence[int] = (),
    ) -> Forward:
        """Extend the cache by `tokens`; the logits behind each, or behind the last `keep`.

        `features` names hidden states by the layers behind them; the last is behind the final
        norm as well. With `parents` the tokens are one and a tree behind it, as in
        `metasd_runtime.model.tree`; afterwards the cache makes sense only once `keep` or `rollback`
        have left a path of it.

        Raises
        ------
        ConfigError
            For a tree that the model cannot read.
        """
        if keep == 0 and self.compiled and self.compiled.serves(self, len(tokens), features):
            self.forwards += 1
            return self.compiled(self, tokens, features, parents)
        tree = {} if parents is None else self._tree(Block(self.length, parents))
        ids = torch.tensor([tokens], device=self.device)
        with attending(self.model, GROUPED) if self._grouped else nullcontext():
            output = self.model(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=keep,
                output_hidden_states=bool(features),
                return_dict=True,
                **tree,
                **{self._cache_argument: self._cache},
            )
        self.forwards += 1
        states = [output.hidden_states[layer][0] for layer in features]
        hidden = torch.cat(states, -1) if states else None
        return Forward(output.logits[0].float(), hidden)

    def _tree(self, block: Block) -> dict[str, Any]:
        """Positions by depth, and a mask under which each node sees its ancestors."""
        positions = torch.tensor([block.positions], device=self.device)
        mask = self._masks(positions, self.length + len(block.positions), {0: block})
        return {"position_ids": positions, "attention_mask": mask}

    def prefill(self, tokens: Sequence[int], features: Sequence[int] = ()) -> Tensor | None:
        """Extend the cache by a prompt, in chunks, computing no more logits than it must.

        Returns the `features` asked for, as `forward` does.
        """
        states: list[Tensor] = []
        while tokens:
            piece, given = self._read(tokens, features)
            tokens = tokens[piece:]
            if given is not None:
                states.append(given)
        return torch.cat(states) if states else None

    def _read(self, tokens: Sequence[int], features: Sequence[int]) -> tuple[int, Tensor | None]:
        """Extend the cache by the first few tokens of a prompt: how many, and their features."""
        if self.compiled and self.compiled.gives(self, features):
            piece = tokens[: self.compiled.piece]
            self.forwards += 1
            return len(piece), self.compiled.read(self, piece, features)
        piece = tokens[:_PREFILL_CHUNK]
        return len(piece), self.forward(piece, keep=1, features=features).features


class Target(CachedModel):
    """The large model whose output MetaSD reproduces.

    Between rounds the cache holds every token but the last, which opens the next block.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(model)
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Target:
        """The target itself: there is one, whoever draws on it."""
        return self


@torch.inference_mode()
def refuse_trees(model: PreTrainedModel) -> None:
    """Refuse a model that cannot read a tree of tokens in one forward, by trying one.

    Raises
    ------
    ConfigError
        With the architecture's name.
    """
    vocab = output_width(model)
    text = [(7 * i + 3) % vocab for i in range(7)]
    tokens, parents = [i % vocab for i in (4, 1, 6, 3, 2)], [-1, -1, 0, 1]
    paths = [[0, 1, 3], [0, 2, 4]]

    def tree() -> list[Tensor]:
        cached = CachedModel(model)
        cached.forward(text)
        logits = cached.forward(tokens, parents=parents).logits
        return [logits[path] for path in paths]

    def chains() -> list[Tensor]:
        cached = CachedModel(model)
        cached.forward(text)
        logits = []
        for path in paths:
            logits.append(cached.forward([tokens[i] for i in path]).logits)
            cached.rollback(len(path))
        return logits

    refuse_other_logits(model, "read a draft tree", "let its drafters draft chains", tree, chains)
