"""The EAGLE heads' step as one compiled graph in place of some forty small operators.

A head's weights are what a graph is given, not part of it, so the graphs of one shape serve all
heads of a pool, and any prompt. They are traced from the eager step itself. A tree's first step
is a chain's; those for its deeper levels have a graph of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.drafters.eagle.chain import Eagle
from metasd_runtime.drafters.eagle.head import Matrix
from metasd_runtime.drafters.eagle.tree import EagleTree
from metasd_runtime.model.graphs import give_up, graph_name, kept_graph, relative_error

__all__ = ["CompiledStep", "compile_steps"]

Graph = Callable[[list[Tensor]], list[Tensor]]

_FORMAT = 2  # part of a graph's name on disk: raise it when the eager step changes
_ENTRIES = (("fuse", False), ("fuse", True), ("chain", False))  # and whether there are several rows
_LEVEL = ("level", True)
_PAIRS = Dim("pairs", min=2, max=1 << 20)
_ROWS = Dim("rows", min=2, max=Matrix.FEW)
_TOKENS = Dim("tokens", min=64, max=1 << 24)
_ALLOWED = 0.02  # of rounding: the eight-bit kernel is given bfloat16


class CompiledStep:
    """Takes the steps of EAGLE heads through compiled graphs.

    Parameters
    ----------
    graphs : mapping of (str, bool) to callable
        By what a step begins with, as `Eagle` names it (or ``level``, of a tree), and whether it
        takes in several pairs.
    """

    def __init__(self, graphs: Mapping[tuple[str, bool], Graph]) -> None:
        self.graphs = graphs

    def serves(self, entry: str, m: int, begin: int) -> bool:
        """Whether there is a graph for m pairs from place `begin` on."""
        return m <= Matrix.FEW and begin + m > 1 and (entry, m > 1) in self.graphs

    def __call__(
        self, eagle: Eagle, entry: str, states: Tensor, ids: Tensor, begin: int
    ) -> tuple[Tensor, Tensor]:
        """What the head's eager step does and returns."""
        m = len(ids)
        graph = self.graphs[entry, m > 1]
        storage = _storage(eagle, begin + m, slice(begin + m))
        out, logits = graph([states.float(), ids, *storage, *chain(*_operands(eagle, entry))])
        return out, logits[:, : len(eagle._head.tokens)]

    def level(
        self, tree: EagleTree, out: Tensor, ids: Tensor, place: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the tree's eager step to its next level does and returns."""
        graph = self.graphs[_LEVEL]
        storage = _storage(tree, hidden.shape[1], slice(place, place + 1))
        out, logits = graph([out, ids, *storage, hidden, *chain(*_operands(tree, "chain"))])
        return out, logits[:, : len(tree._head.tokens)]


def compile_steps(
    drafters: Iterable[Drafter], say: Callable[[str], None] = lambda message: None
) -> None:
    """Have the EAGLE heads among some drafters take compiled steps.

    Graphs are compiled once for a shape and kept in the package's cache folder. Where they cannot
    be made, or do not agree with the eager step, the heads go on without, with a warning; on
    other devices than the CPU they do so without one.

    Parameters
    ----------
    drafters : iterable of Drafter
    say : callable
        Told what takes time.
    """
    made: dict[str, CompiledStep | None] = {}
    bases = chain.from_iterable(drafter.bases for drafter in drafters)
    for eagle in chain.from_iterable(base.parts for base in bases):
        if not isinstance(eagle, Eagle) or eagle._device.type != "cpu":
            continue
        name = graph_name(*_about(eagle), _entries(eagle))
        if name not in made:
            made[name] = _compiled(eagle, say)
        eagle.compiled = made[name]


def _compiled(eagle: Eagle, say: Callable[[str], None]) -> CompiledStep | None:
    try:
        step = CompiledStep({entry: _graph(eagle, *entry, say) for entry in _entries(eagle)})
        _compare(eagle, step)
    except Exception as error:  # whatever tracing, the compiler or the loader make of a head
        give_up("the EAGLE heads' steps are", error)
        return None
    return step


def _entries(eagle: Eagle) -> tuple[tuple[str, bool], ...]:
    return (*_ENTRIES, _LEVEL) if isinstance(eagle, EagleTree) else _ENTRIES


def _graph(eagle: Eagle, entry: str, several: bool, say: Callable[[str], None]) -> Graph:
    package = kept_graph(
        graph_name(*_about(eagle), entry, several),
        f"a step of the EAGLE heads ({_entries(eagle).index((entry, several)) + 1} of "
        f"{len(_entries(eagle))})",
        lambda: _export(eagle, entry, several),
        say,
    )
    run: Graph = package.loader.run  # a tenth of a step less than calling the package
    return run


class _Step(nn.Module):
    """A head's eager step as a function of tensors alone."""

    def __init__(self, eagle: Eagle, entry: str) -> None:
        super().__init__()
        self.eagle, self.entry = eagle, entry

    def forward(
        self, states: Tensor, ids: Tensor, storage: list[Tensor], matrices: list[list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        twin = _twin(self.eagle, self.entry, storage, matrices)
        begin = storage[0].shape[0] - ids.shape[0]
        step: tuple[Tensor, Tensor] = twin._eager_step(self.entry, states, ids, begin)
        return step


class _Level(nn.Module):
    """A tree's eager step to its next level, likewise."""

    def __init__(self, tree: EagleTree) -> None:
        super().__init__()
        self.tree = tree

    def forward(
        self,
        states: Tensor,
        ids: Tensor,
        storage: list[Tensor],
        hidden: Tensor,
        matrices: list[list[Tensor]],
    ) -> tuple[Tensor, Tensor]:
        twin = _twin(self.tree, "chain", storage, matrices)
        step: tuple[Tensor, Tensor] = twin._eager_level(states, ids, 0, hidden)
        return step


def _twin(
    eagle: Eagle, entry: str, storage: Sequence[Tensor], matrices: Sequence[Sequence[Tensor]]
) -> Any:
    """A head that reads these tensors instead of its own."""
    twin: Any = copy.copy(eagle)
    twin._keys, twin._values, twin._cos, twin._sin, twin._embeddings, twin._norm = storage
    pairs = zip(_matrices(eagle, entry), matrices, strict=True)
    enter, twin._qkv, twin._o, twin._gate_up, twin._down, twin._head = (
        matrix.reading(*operands) for matrix, operands in pairs
    )
    setattr(twin, f"_{entry}", enter)
    return twin


def _matrices(eagle: Eagle, entry: str) -> list[Matrix]:
    """Those that a step reads, the output head's last."""
    enter = eagle._fuse if entry == "fuse" else eagle._chain  # a tree's levels are chained as well
    return [enter, eagle._qkv, eagle._o, eagle._gate_up, eagle._down, eagle._head.matrix]


def _operands(eagle: Eagle, entry: str) -> list[list[Tensor]]:
    return [[*matrix.operands] for matrix in _matrices(eagle, entry)]


def _storage(eagle: Eagle, end: int, turns: slice) -> list[Tensor]:
    """What a step reads besides the matrices, and writes; its part in use tells the place."""
    return [
        eagle._keys[:end],
        eagle._values[:end],
        eagle._cos[turns],
        eagle._sin[turns],
        eagle._embeddings,
        eagle._norm,
    ]


def _export(eagle: Eagle, entry: str, several: bool) -> torch.export.ExportedProgram:
    """Trace the step on blank tensors of sizes that none of the fixed ones are."""
    m, end, tokens = 3 if several else 1, 37, 64 * 101
    level = (entry, several) == _LEVEL
    layers = len(eagle.shape.layers) if entry == "fuse" else 1
    states, ids = torch.zeros(m, layers * eagle.shape.hidden), torch.zeros(m, dtype=torch.long)
    storage = [_blank(x) for x in _storage(eagle, end, slice(1 if level else end))]
    *fixed, head = [[_blank(x) for x in xs] for xs in _operands(eagle, entry)]
    matrices = [*fixed, [x.new_zeros(tokens, *x.shape[1:]) for x in head]]
    row, pairs = {0: _ROWS} if several else None, {0: _PAIRS}
    stored = [pairs, pairs, *[None if level else pairs] * 2, None, None]
    read = [*[[None] * len(x) for x in fixed], [{0: _TOKENS}] * len(head)]
    module: nn.Module = _Step(eagle, entry)
    arguments: tuple[Any, ...] = states, ids, storage, matrices
    shapes: tuple[Any, ...] = row, row, stored, read
    if level:
        assert isinstance(eagle, EagleTree)
        module = _Level(eagle)
        hidden = torch.zeros(m, end, dtype=torch.bool)
        arguments = states, ids, storage, hidden, matrices
        shapes = row, row, stored, {0: _ROWS, 1: _PAIRS}, read
    return torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)


def _blank(x: Tensor) -> Tensor:
    """Storage written in inference mode may not be traced."""
    return torch.zeros(x.shape, dtype=x.dtype)


@torch.inference_mode()
def _compare(eagle: Eagle, step: CompiledStep) -> None:
    """Refuse graphs that do not what the eager step does, up to rounding.

    Raises
    ------
    ValueError
        With the relative error.
    """
    own, other = eagle.clone(), eagle.clone()
    draws = torch.Generator().manual_seed(0)

    def given(entry: str, m: int) -> tuple[Tensor, Tensor]:
        width = eagle.shape.hidden * (len(eagle.shape.layers) if entry == "fuse" else 1)
        ids = torch.randint(0, len(eagle._embeddings), (m,), generator=draws)
        return torch.randn(m, width, generator=draws), ids

    def check(m: int, end: int, ours: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
        stored = [(x._keys[:end], x._values[:end]) for x in (other, own)]
        for x, y in zip((*ours, *stored[0]), (*truth, *stored[1]), strict=True):
            if not (error := relative_error(x, y)) <= _ALLOWED:
                raise ValueError(f"a compiled step of {m} is off by {error:.2g}")

    begin = 0
    for entry, m in (("fuse", 3), ("fuse", 1), ("chain", 1)):
        states, ids = given(entry, m)
        truth = own._eager_step(entry, states, ids, begin)
        ours = step(other, entry, states, ids, begin)
        begin += m
        check(m, begin, ours, truth)
    if isinstance(own, EagleTree) and isinstance(other, EagleTree):
        states, ids = given("level", 3)
        hidden = torch.zeros(3, begin + 3, dtype=torch.bool)
        hidden[:, begin:] = ~torch.eye(3, dtype=torch.bool)
        truth = own._eager_level(states, ids, begin, hidden)
        check(3, begin + 3, step.level(other, states, ids, begin, hidden), truth)


def _about(eagle: Eagle) -> tuple[object, ...]:
    """All that the graphs depend on; the output head's rows may be any number."""
    operands = [
        [(x.dtype, tuple(x.shape)) for x in matrix.operands]
        for matrix in (eagle._fuse, *_matrices(eagle, "chain")[:-1])
    ]
    head = [x.dtype for x in eagle._head.matrix.operands]
    embeddings = eagle._embeddings.dtype, tuple(eagle._embeddings.shape)
    return _FORMAT, "eagle", eagle.shape, operands, head, embeddings
