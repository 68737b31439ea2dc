"""The EAGLE heads' step as one compiled graph in place of some forty small operators.

A head's weights are what a graph is given, not part of it, so the graphs of one shape serve all
heads of a pool, and any prompt. They are traced from the eager step itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from metasd_runtime.draft import Drafter
from metasd_runtime.drafters.eagle import Eagle
from metasd_runtime.drafters.eagle_head import Matrix
from metasd_runtime.graphs import give_up, graph_name, kept_graph, relative_error

__all__ = ["CompiledStep", "compile_steps"]

Graph = Callable[[list[Tensor]], list[Tensor]]

_FORMAT = 1  # part of a graph's name on disk: raise it when the eager step changes
_ENTRIES = (("fuse", False), ("fuse", True), ("chain", False))  # and whether there are several rows
_PAIRS = Dim("pairs", min=2, max=1 << 20)
_ROWS = Dim("rows", min=2, max=Matrix.FEW)
_TOKENS = Dim("tokens", min=64, max=1 << 24)
_ALLOWED = 0.02  # of rounding: the eight-bit kernel is given bfloat16


class CompiledStep:
    """Takes the steps of EAGLE heads through compiled graphs.

    Parameters
    ----------
    graphs : mapping of (str, bool) to callable
        By what a step begins with, as `Eagle` names it, and whether it takes in several pairs.
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
        matrices = [x for matrix in _matrices(eagle, entry) for x in matrix.operands]
        out, logits = graph([*_arguments(eagle, states, ids, begin + m), *matrices])
        return out, logits[:, : len(eagle._head.tokens)]


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
    for drafter in drafters:
        eagle = drafter.base
        if not isinstance(eagle, Eagle) or eagle._device.type != "cpu":
            continue
        name = graph_name(*_about(eagle))
        if name not in made:
            made[name] = _compiled(eagle, say)
        eagle.compiled = made[name]


def _compiled(eagle: Eagle, say: Callable[[str], None]) -> CompiledStep | None:
    try:
        step = CompiledStep(
            {(entry, several): _graph(eagle, entry, several, say) for entry, several in _ENTRIES}
        )
        _compare(eagle, step)
    except Exception as error:  # whatever tracing, the compiler or the loader make of a head
        give_up("the EAGLE heads' steps are", error)
        return None
    return step


def _graph(eagle: Eagle, entry: str, several: bool, say: Callable[[str], None]) -> Graph:
    package = kept_graph(
        graph_name(*_about(eagle), entry, several),
        f"a step of the EAGLE heads ({_ENTRIES.index((entry, several)) + 1} of {len(_ENTRIES)})",
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
        self,
        states: Tensor,
        ids: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        embeddings: Tensor,
        norm: Tensor,
        matrices: list[list[Tensor]],
    ) -> tuple[Tensor, Tensor]:
        twin: Any = copy.copy(self.eagle)
        twin._keys, twin._values, twin._cos, twin._sin = keys, values, cos, sin
        twin._embeddings, twin._norm = embeddings, norm
        pairs = zip(_matrices(self.eagle, self.entry), matrices, strict=True)
        enter, twin._qkv, twin._o, twin._gate_up, twin._down, twin._head = (
            matrix.reading(*operands) for matrix, operands in pairs
        )
        setattr(twin, f"_{self.entry}", enter)
        step: tuple[Tensor, Tensor] = twin._eager_step(
            self.entry, states, ids, keys.shape[0] - ids.shape[0]
        )
        return step


def _matrices(eagle: Eagle, entry: str) -> list[Matrix]:
    """Those that a step reads, the output head's last."""
    enter = eagle._fuse if entry == "fuse" else eagle._chain
    return [enter, eagle._qkv, eagle._o, eagle._gate_up, eagle._down, eagle._head.matrix]


def _arguments(eagle: Eagle, states: Tensor, ids: Tensor, end: int) -> tuple[Tensor, ...]:
    """What a graph takes besides the matrices; the storage's part in use tells it the place."""
    return (
        states.float(),
        ids,
        eagle._keys[:end],
        eagle._values[:end],
        eagle._cos[:end],
        eagle._sin[:end],
        eagle._embeddings,
        eagle._norm,
    )


def _export(eagle: Eagle, entry: str, several: bool) -> torch.export.ExportedProgram:
    """Trace the step on blank tensors of sizes that none of the fixed ones are."""
    m, end, tokens = 3 if several else 1, 37, 64 * 101
    layers = len(eagle.shape.layers) if entry == "fuse" else 1
    states = torch.zeros(m, layers * eagle.shape.hidden)
    arguments = _arguments(eagle, states, torch.zeros(m, dtype=torch.long), end)
    *fixed, head = [[*matrix.operands] for matrix in _matrices(eagle, entry)]
    matrices = [*fixed, [x.new_zeros(tokens, *x.shape[1:]) for x in head]]
    row = {0: _ROWS} if several else None
    shapes = (
        *(row, row),
        *[{0: _PAIRS}] * 4,
        *(None, None),
        [*[[None] * len(x) for x in fixed], [{0: _TOKENS}] * len(head)],
    )
    return torch.export.export(
        _Step(eagle, entry),
        (*map(_blank, arguments), [[*map(_blank, operands)] for operands in matrices]),
        dynamic_shapes=shapes,
        strict=False,
    )


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
    begin = 0
    for entry, m in (("fuse", 3), ("fuse", 1), ("chain", 1)):
        layers = len(eagle.shape.layers) if entry == "fuse" else 1
        states = torch.randn(m, layers * eagle.shape.hidden, generator=draws)
        ids = torch.randint(0, len(eagle._embeddings), (m,), generator=draws)
        truth = own._eager_step(entry, states, ids, begin)
        ours = step(other, entry, states, ids, begin)
        begin += m
        stored = ((x._keys[:begin], x._values[:begin]) for x in (other, own))
        for x, y in zip((*ours, *next(stored)), (*truth, *next(stored)), strict=True):
            if not (error := relative_error(x, y)) <= _ALLOWED:
                raise ValueError(f"a compiled step of {m} is off by {error:.2g}")


def _about(eagle: Eagle) -> tuple[object, ...]:
    """All that the graphs depend on; the output head's rows may be any number."""
    operands = [
        [(x.dtype, tuple(x.shape)) for x in matrix.operands]
        for matrix in (eagle._fuse, *_matrices(eagle, "chain")[:-1])
    ]
    head = [x.dtype for x in eagle._head.matrix.operands]
    embeddings = eagle._embeddings.dtype, tuple(eagle._embeddings.shape)
    return _FORMAT, "eagle", eagle.shape, operands, head, embeddings
