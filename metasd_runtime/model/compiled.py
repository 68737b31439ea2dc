"""The target's forward compiled ahead of time: blocks of fixed size, weights frozen, kept on disk.

A graph takes a block of exactly n tokens over a text of any length, so one is compiled for each
size that decoding needs (a draft with the token before it, one token), and one that reads prompts
in pieces; a shorter block is filled up, and what was filled in is masked and forgotten. A draft
tree differs from a chain in its mask and positions alone, which a graph is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from metasd_runtime.model.attention import grouped
from metasd_runtime.model.graphs import give_up, graph_name, kept_graph, relative_error
from metasd_runtime.model.hf import SlotLayer, cache_argument, cache_of, full_attention
from metasd_runtime.model.target import CachedModel, Forward
from metasd_runtime.model.tree import Block, ancestry

__all__ = ["CompiledForward", "compile_forward"]

Graph = Callable[..., tuple[Tensor, ...]]

_FORMAT = 2  # part of a graph's name on disk: raise it when what a graph takes or gives changes
_PIECE = 64  # a graph reads so many positions of the storage, or a multiple
_PROMPT = 128  # tokens of a prompt that are read at once
_POSITIONS = Dim("positions", min=_PIECE, max=1 << 20)
_FEW = 8  # on a CPU one token takes no less time than so many: the weights' way is the same
_PROBE = 24


class CompiledForward:
    """Runs blocks through compiled graphs, in place of the model's own forward.

    Parameters
    ----------
    graphs : mapping of int to callable
        By block size.
    features : tuple of int
        The hidden states the graphs give, by the layers behind them.
    reading : mapping of int to callable
        Those whose logits are the last token's alone, by block size.
    """

    def __init__(
        self,
        graphs: Mapping[int, Graph],
        features: tuple[int, ...],
        reading: Mapping[int, Graph],
    ) -> None:
        self.graphs = dict(sorted(graphs.items()))
        self.features = features
        self._reading = dict(sorted({**self.graphs, **reading}.items()))
        self.piece = max(self._reading)

    def gives(self, cached: CachedModel, features: Sequence[int]) -> bool:
        """Whether the graphs can go on behind what is cached, and give these features."""
        return cached.layers[-1].is_initialized and set(features) <= set(self.features)

    def serves(self, cached: CachedModel, n: int, features: Sequence[int]) -> bool:
        """Whether there is a graph for a block of n tokens that gives these features."""
        return n <= max(self.graphs) and self.gives(cached, features)

    @torch.inference_mode()
    def read(
        self, cached: CachedModel, tokens: Sequence[int], features: Sequence[int]
    ) -> Tensor | None:
        """Extend the cache by at most `piece` tokens; their features, if any are asked for."""
        _, *states = self._run(self._reading, cached, tokens)
        return self._of_layers(states[0][: len(tokens)], features) if features else None

    @torch.inference_mode()
    def __call__(
        self,
        cached: CachedModel,
        tokens: Sequence[int],
        features: Sequence[int],
        parents: Sequence[int] | None = None,
    ) -> Forward:
        """Extend the cache by `tokens`; the logits behind each of them."""
        n = len(tokens)
        logits, *states = self._run(self.graphs, cached, tokens, parents)
        return Forward(logits[:n], self._of_layers(states[0][:n], features) if features else None)

    def _of_layers(self, states: Tensor, features: Sequence[int]) -> Tensor:
        """Of the graphs' hidden states those of some layers."""
        if tuple(features) == self.features:
            return states
        width = states.shape[1] // len(self.features)
        layers = states.unflatten(1, (len(self.features), width))
        return layers[:, [self.features.index(layer) for layer in features]].flatten(1)

    def _run(
        self,
        graphs: Mapping[int, Graph],
        cached: CachedModel,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
    ) -> tuple[Tensor, ...]:
        """What the smallest graph that takes so many tokens gives at each place, fillers' too."""
        n, begin = len(tokens), cached.length
        size = next(size for size in graphs if size >= n)
        for layer in cached.layers:
            layer.reserve(_read(begin + size))
        block = [*tokens, *[tokens[-1]] * (size - n)]
        given = graphs[size](*_arguments(cached, block, begin, parents))
        for layer in cached.layers:
            layer.length = begin + n
        return given


def compile_forward(
    cached: CachedModel,
    blocks: Sequence[int],
    features: tuple[int, ...] = (),
    say: Callable[[str], None] = lambda message: None,
) -> CompiledForward | None:
    """Compile a model's forward for blocks of these sizes, or load what was compiled before.

    The cache is emptied. Graphs are kept in the package's cache folder, under a name made of all
    that they depend on: the weights to the last bit, versions, processor, threads.

    Parameters
    ----------
    cached : CachedModel
    blocks : sequence of int
        Sizes, at least 1. On a CPU a size of 1 is not compiled where another of at most 8 is: that
        graph takes single tokens as well, in no more time.
    features : tuple of int
        Hidden states to give, by the layers behind them.
    say : callable
        Told what takes time.

    Returns
    -------
    CompiledForward, or None with a warning where the model cannot be compiled (no C++ compiler,
    windowed attention, ...) or the graphs do not agree with its own forward; decode without.
    """
    try:
        _check(cached)
        weights = _weights_digest(cached.model)
        graphs = {
            size: _graph(cached, size, 0, features, weights, say)
            for size in _sizes(blocks, cached.device)
        }
        reading = {_PROMPT: _graph(cached, _PROMPT, 1, features, weights, say)}
        compiled = CompiledForward(graphs, features, reading)
        _compare(cached, compiled)
    except Exception as error:  # whatever tracing, the compiler or the loader make of a model
        give_up("the target is", error)
        return None
    finally:
        cached.reset()
    return compiled


def _sizes(blocks: Sequence[int], device: torch.device) -> list[int]:
    """The sizes to compile: single tokens share the graph of a few, where that costs nothing."""
    sizes = sorted(set(blocks))
    shared = device.type == "cpu" and any(1 < size <= _FEW for size in sizes)
    return [size for size in sizes if size > 1 or not shared]


class _Block(nn.Module):
    """A forward over one block as a function of tensors alone."""

    def __init__(self, model: Any, keep: int, features: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.keep, self.features = model, keep, features
        self._cache_argument = cache_argument(model)

    def forward(
        self,
        ids: Tensor,
        slots: Tensor,
        positions: Tensor,
        mask: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        pairs = zip(keys, values, strict=True)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=self.keep,
            output_hidden_states=bool(self.features),
            return_dict=True,
            **{self._cache_argument: cache_of([SlotLayer(k, v, slots) for k, v in pairs])},
        )
        logits = output.logits[0].float()
        if not self.features:
            return (logits,)
        return logits, torch.cat([output.hidden_states[layer][0] for layer in self.features], -1)


def _arguments(
    cached: CachedModel,
    block: Sequence[int],
    begin: int,
    parents: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """What a graph takes for a block (of a tree, with `parents`) that begins behind `begin` tokens.

    Fillers follow each other behind the last token.
    """
    read = _read(begin + len(block))
    stored = [(layer.keys, layer.values) for layer in cached.layers]
    keys, values = ([s[:, :, :read] for s in side] for side in zip(*stored, strict=True))
    first = keys[0]
    slots = positions = torch.arange(begin, begin + len(block), device=first.device)
    hidden = torch.arange(first.shape[2], device=first.device) > slots[:, None]
    if parents is not None:
        tree = Block(begin, [*parents, *range(len(parents) - 1, len(block) - 2)])
        positions = slots.new_tensor(tree.positions)
        hidden[:, slots] = ~ancestry(tree.parents).to(first.device)
    mask = torch.zeros(hidden.shape, dtype=first.dtype, device=first.device)
    mask.masked_fill_(hidden, torch.finfo(first.dtype).min)
    last = (cached.max_length or begin + len(block)) - 1  # fillers may stand behind the context
    positions = positions.clamp(max=last)[None]
    ids = torch.tensor([block], device=first.device)
    return ids, slots, positions, mask[None, None], keys, values


def _read(needed: int) -> int:
    """How many positions a graph reads where so many are needed."""
    return -(-needed // _PIECE) * _PIECE


def _check(cached: CachedModel) -> None:
    if not full_attention(cached.model):
        raise ValueError("some of its layers attend to a window of the text")
    if getattr(cached.model, "is_quantized", False):
        raise ValueError("its weights are quantised")


def _graph(
    cached: CachedModel,
    size: int,
    keep: int,
    features: tuple[int, ...],
    weights: str,
    say: Callable[[str], None],
) -> Graph:
    """For a block of that size, with the logits of all its tokens or of the last `keep`."""
    graph: Graph = kept_graph(
        _name(cached, size, keep, features, weights),
        f"the target for blocks of {size} (minutes)",
        lambda: _export(cached, size, keep, features),
        say,
        freezing=True,
    )
    return graph


def _export(
    cached: CachedModel, size: int, keep: int, features: tuple[int, ...]
) -> torch.export.ExportedProgram:
    cached.reset()
    cached.prefill(_probe_tokens(cached))
    arguments = tuple(_leave_inference(x) for x in _arguments(cached, [0] * size, cached.length))
    n_layers = len(cached.layers)
    shapes = (None, None, None, {3: _POSITIONS}, *[[{2: _POSITIONS}] * n_layers] * 2)
    with grouped(cached.model):
        return torch.export.export(
            _Block(cached.model, keep, features), arguments, dynamic_shapes=shapes, strict=False
        )


def _leave_inference(x: Any) -> Any:
    """Copies that may be traced: storage written in inference mode may not."""
    return [_leave_inference(y) for y in x] if isinstance(x, list) else x.clone()


def _compare(cached: CachedModel, compiled: CompiledForward) -> None:
    """Refuse graphs whose logits are not the model's own, up to rounding.

    Raises
    ------
    ValueError
        With the relative error.
    """
    allowed = 1e-3 if cached.model.dtype in (torch.float32, torch.float64) else 0.1
    probe = _probe_tokens(cached)
    cached.reset()
    cached.prefill(probe)
    for n in {1, *compiled.graphs}:
        block = probe[:n] if n <= _PROBE else (probe * n)[:n]
        own = cached.forward(block, features=compiled.features)
        cached.rollback(n)
        other = compiled(cached, block, compiled.features)
        cached.rollback(n)
        cached.forwards -= 1
        for ours, theirs in zip(other, own, strict=True):
            if ours is None or theirs is None:
                continue
            if not (error := relative_error(ours, theirs)) <= allowed:
                raise ValueError(f"a compiled block of {n} is off by {error:.2g}")


def _probe_tokens(cached: CachedModel) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, cached.vocab_size, (_PROBE,), generator=generator).tolist()


def _weights_digest(model: nn.Module) -> str:
    """Of every parameter and buffer, to the last bit."""
    digest = hashlib.blake2b(digest_size=20)
    for name, value in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _name(
    cached: CachedModel, size: int, keep: int, features: tuple[int, ...], weights: str
) -> str:
    """A digest of all that a graph depends on."""
    return graph_name(
        _FORMAT,
        weights,
        size,
        keep,
        features,
        cached.model.config.to_json_string(),
        str(cached.device),
    )
