"""Bind a policy's kernels into a compiled loop, so that the compilation survives the process.

Numba inlines what it can see, and caches on disk what stands in a file. A loop that takes its
policy as an argument gets neither. So a template module (the live wrappers here, the
simulator's engine) is written once with a marker line; `specialise` writes a copy of it that
imports one policy's kernels at that line, keyed by the text of everything it depends on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

from metasd_bandits.cache import cache_dir

__all__ = ["MARKER", "specialise"]

MARKER = "# bound by specialise"


def specialise(template: ModuleType, **kernels: Callable[..., Any]) -> ModuleType:
    """A copy of `template` whose marked names are the given kernels.

    Parameters
    ----------
    template : module
        Its source holds exactly one line that ends with ``# bound by specialise``; that line
        names what is to be bound.
    **kernels : compiled functions
        Name in the template -> function decorated with `numba.njit`. Functions that live in an
        importable file are cached across processes; others (typed at a prompt) are compiled
        anew each time.

    Returns
    -------
    module
        Private to this combination; the same call gives the same module.
    """
    text = inspect.getsource(template)
    if sum(line.endswith(MARKER) for line in text.splitlines()) != 1:
        raise ValueError(f"{template.__name__} needs exactly one line ending in {MARKER!r}")
    homes = [_home(kernel) for kernel in kernels.values()]
    importable = all(home is not None for home in homes)
    binding = "\n".join(
        f"from {k.__module__} import {k.__name__} as {name}" for name, k in kernels.items()
    )
    digest = hashlib.sha256(numba.__version__.encode())
    for part in (text, binding, *(_package_text(home) for home in homes if home)):
        digest.update(part.encode())
    if not importable:
        digest.update(repr([id(k) for k in kernels.values()]).encode())
    name = f"{template.__name__.rpartition('.')[2]}_{digest.hexdigest()[:24]}"
    full_name = f"metasd_kernels_{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    lines = [
        (binding if importable else "") if line.endswith(MARKER) else line
        for line in text.splitlines()
    ]
    if not importable:
        return _in_memory(full_name, "\n".join(lines), kernels)
    path = _write_once(cache_dir() / "kernels" / f"{name}.py", "\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(full_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


def _home(kernel: Callable[..., Any]) -> Path | None:
    """The file a kernel can be imported from, or None."""
    module = sys.modules.get(kernel.__module__)
    file = getattr(module, "__file__", None)
    if file is None or kernel.__module__ == "__main__":
        return None
    return Path(file) if getattr(module, kernel.__name__, None) is kernel else None


def _package_text(home: Path) -> str:
    """Text of the kernel's file and of the shared kernels it is built from."""
    own = Path(__file__).parent
    return "\n".join(p.read_text() for p in (home, own / "state.py", own / "stream.py"))


def _in_memory(name: str, text: str, kernels: dict[str, Callable[..., Any]]) -> ModuleType:
    """A module that no file backs; Numba cannot cache it, so ``cache=True`` is taken out."""
    module = ModuleType(name)
    module.__dict__.update(kernels)
    exec(compile(text.replace("cache=True", "cache=False"), name, "exec"), module.__dict__)
    sys.modules[name] = module
    return module


def _write_once(path: Path, text: str) -> Path:
    """Write beside, then rename, unless the file stands there already."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    return path
