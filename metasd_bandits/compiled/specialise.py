"""Bind a policy's kernels into a compiled loop, so that the compilation survives the process.

Numba inlines what it can see, and caches on disk what stands in a file. A loop that takes its
policy as an argument gets neither. So a template module (the live wrappers here, the
simulator's engine) is written once with a marker line; `specialise` writes a copy of it that
imports one policy's kernels at that line, keyed by the text of everything it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

from metasd_bandits.cache import cache_folder

__all__ = ["MARKER", "specialise"]

MARKER = "# bound by specialise"
# How functions are compiled, and what Numba makes of some of them: an old module beside new ones
# corrupts memory.
_TOOLS = tuple(
    importlib.import_module(f"metasd_bandits.compiled.{name}")
    for name in ("borrow", "interpreted", "kernel", "lean", "parts")
)


def _alone(function: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    """One thread at a time: the others would find a module whose text has not run to its end."""
    lock = threading.RLock()

    @functools.wraps(function)
    def waiting(*arguments: Any, **kernels: Any) -> ModuleType:
        with lock:
            return function(*arguments, **kernels)

    return waiting


@_alone
def specialise(template: ModuleType, **kernels: Callable[..., Any]) -> ModuleType:
    """A copy of `template` whose marked names are the given kernels.

    Parameters
    ----------
    template : module
        Its source holds at least one line that ends with ``# bound by specialise``; such lines
        import stand-ins for what is to be bound. A name that gets no kernel stays unbound.
    **kernels : compiled functions
        Name in the template -> function decorated with `metasd_bandits.compiled.kernel.kernel`.
        Functions that live in an importable file are cached across processes; others (typed at
        a prompt), and all where the cache folder cannot be written (with a warning, once), are
        compiled anew each time.

    Returns
    -------
    module
        Private to this combination; the same call gives the same module.
    """
    text = inspect.getsource(template)
    if MARKER not in text:
        raise ValueError(f"{template.__name__} needs a line ending in {MARKER!r}")
    homes = [_home(kernel) for kernel in kernels.values()]
    importable = all(home is not None for home in homes)
    binding = "\n".join(
        f"from {k.__module__} import {k.__name__} as {name}" for name, k in kernels.items()
    )
    digest = hashlib.sha256(numba.__version__.encode())
    for part in (text, binding, *_texts(template, kernels)):
        digest.update(part.encode())
    if not importable:
        digest.update(repr([id(k) for k in kernels.values()]).encode())
    name = f"{template.__name__.rpartition('.')[2]}_{digest.hexdigest()[:24]}"
    full_name = f"metasd_kernels_{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    lines = ["" if line.endswith(MARKER) else line for line in text.splitlines()]
    if importable:
        place = next(i for i, line in enumerate(text.splitlines()) if line.endswith(MARKER))
        lines[place] = binding
    if not importable:
        return _in_memory(full_name, "\n".join(lines), kernels)
    try:
        path = _write_once(cache_folder("kernels") / f"{name}.py", "\n".join(lines) + "\n")
    except OSError as error:
        _warn_once(f"{error}. Until then, kernels are compiled anew in every process")
        lines[place] = ""
        return _in_memory(full_name, "\n".join(lines), kernels)
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


def _texts(template: ModuleType, kernels: dict[str, Callable[..., Any]]) -> list[str]:
    """Texts of all files whose compiled functions the kernels or the template reach."""
    files: set[str] = set()
    seen: set[Callable[..., Any]] = set()
    for kernel in kernels.values():
        _follow(kernel, seen, files)
    bound = [value for name, value in vars(template).items() if name in kernels]
    seen.update(_plain(value) for value in bound)  # a stand-in that will be replaced
    for name, value in vars(template).items():
        if name not in kernels and hasattr(value, "py_func"):
            _follow(value, seen, files)
    files.update(inspect.getfile(tool) for tool in _TOOLS)
    return [Path(file).read_text() for file in sorted(files) if Path(file).is_file()]


def _follow(function: Callable[..., Any], seen: set[Callable[..., Any]], files: set[str]) -> None:
    """Add the file of a compiled function, and those of the compiled functions it calls."""
    plain = _plain(function)
    if plain in seen:
        return
    seen.add(plain)
    files.add(plain.__code__.co_filename)
    used = [plain.__globals__.get(name) for name in plain.__code__.co_names]
    used += [cell.cell_contents for cell in plain.__closure__ or ()]
    for value in used:
        if hasattr(value, "py_func"):
            _follow(value, seen, files)


def _plain(function: Any) -> Any:
    return getattr(function, "py_func", function)


def _in_memory(name: str, text: str, kernels: dict[str, Callable[..., Any]]) -> ModuleType:
    """A module that no file backs; Numba cannot cache it, so ``cache=True`` is taken out."""
    module = ModuleType(name)
    module.__dict__.update(kernels)
    exec(compile(text.replace("cache=True", "cache=False"), name, "exec"), module.__dict__)
    sys.modules[name] = module
    return module


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _write_once(path: Path, text: str) -> Path:
    """Write beside, then rename, unless the file stands there already."""
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    return path
