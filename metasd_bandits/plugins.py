"""Other people's parts: entry points of installed packages, and files named on a command line.

A file registers what it holds when it runs, by `metasd_bandits.register_policy` and its like.
Entry points name a policy's class, or what makes a drafter or an acceptance model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from metasd_bandits import checks

__all__ = ["load_file", "load_plugins"]

_FILES = "METASD_PLUGINS"  # in the environment, so that worker processes load them as well


def load_file(file: Path) -> None:
    """Run a file that registers its parts, here and in the processes started from now on.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If there is no such file, or it raises.
    """
    path = file.resolve()
    if not path.is_file():
        raise checks.ConfigError(f"plugin {str(file)!r}: there is no such file")
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    known = os.environ.get(_FILES, "").split(os.pathsep)
    os.environ[_FILES] = os.pathsep.join(dict.fromkeys([*filter(None, known), str(path)]))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise checks.ConfigError(f"plugin {str(file)!r} is no Python file; name it NAME.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise checks.ConfigError(
            f"plugin {str(file)!r}: {type(error).__name__}: {error}"
        ) from error


@cache
def load_plugins(group: str, register: Callable[[str, Any], object]) -> None:
    """Register the entry points of a group, once, after the files named on the command line.

    Raises
    ------
    metasd_bandits.checks.ConfigError
        If one cannot be imported.
    """
    for file in filter(None, os.environ.get(_FILES, "").split(os.pathsep)):
        load_file(Path(file))
    for point in entry_points(group=group):
        try:
            register(point.name, point.load())
        except Exception as error:
            raise checks.ConfigError(
                f"entry point {point.name!r} of {group}: {type(error).__name__}: {error}; mend or "
                "uninstall the package it comes from"
            ) from error
