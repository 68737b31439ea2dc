"""Graphs compiled ahead of time with AOTInductor, and kept on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor

from metasd_bandits.cache import cache_folder

__all__ = ["give_up", "graph_name", "kept_graph", "relative_error"]


def graph_name(*about: object) -> str:
    """A digest of all that a graph depends on: what is told, versions, processor, threads."""
    machine = (
        torch.__version__,
        transformers.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )
    return hashlib.blake2b(repr((*about, *machine)).encode(), digest_size=20).hexdigest()


def kept_graph(
    name: str,
    what: str,
    export: Callable[[], torch.export.ExportedProgram],
    say: Callable[[str], None],
    **configs: Any,
) -> Any:
    """A graph from disk, or compiled now and written there.

    Parameters
    ----------
    name : str
        Made by `graph_name`.
    what : str
        What it is and how long compiling takes, for `say`.
    export : callable
        Makes the program, where it must be compiled.
    say : callable
        Told what takes time.
    **configs
        Of the inductor.

    Returns
    -------
    AOTICompiledModel

    Raises
    ------
    Exception
        Whatever tracing, the compiler or the loader make of it.
    """
    path = cache_folder("compiled") / f"{name}.pt2"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            begin = time.perf_counter()
            say(f"compiling {what}, once; kept in {path.parent}")
            _compile(export, configs, path)
            say(f"compiled in {time.perf_counter() - begin:.0f} s")
    return torch._inductor.aoti_load_package(str(path))


@torch.no_grad()
def _compile(
    export: Callable[[], torch.export.ExportedProgram], configs: dict[str, Any], path: Path
) -> None:
    """Compile, and put the package in place when it is whole."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        warnings.simplefilter("ignore")  # of tracing and lowering, for their developers
        made = torch._inductor.aoti_compile_and_package(
            export(), package_path=os.path.join(folder, "graph.pt2"), inductor_configs=configs
        )
        os.replace(made, path)


def relative_error(x: Tensor, truth: Tensor) -> float:
    """How far from a tensor another is, in units of the first's own variation."""
    truth = truth.float()
    return float((x.float() - truth).norm() / (truth - truth.mean()).norm())


def give_up(what: str, error: Exception) -> None:
    """Warn that something is not compiled, and why."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(
        f"{what} not compiled ({reason}); decoding goes on without, its output the same",
        RuntimeWarning,
        stacklevel=3,
    )
