"""The model store: folders in the cache whose files are known, whole, and checked when used.

A stored model is a folder ``<cache>/models/<name>`` with the usual Hugging Face files and a
``manifest.json`` that holds every file's size and SHA-256. It is built in a folder beside it
and renamed when it is complete, under a lock, so that whoever sees the folder sees all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from metasd_bandits.cache import CacheError, cache_dir, cache_folder

__all__ = ["ModelError", "StoredModel", "build", "find", "remove", "verify"]

MANIFEST = "manifest.json"


class ModelError(RuntimeError):
    """A model that cannot be found, fetched or trusted; the message says what to do."""


@dataclass(frozen=True)
class StoredModel:
    """A model in the store.

    Attributes
    ----------
    name : str
    path : pathlib.Path
        The folder, loadable by ``from_pretrained``.
    size : int
        Bytes of all its files.
    source : dict
        Where it came from: package, version, checksum of the original file.
    """

    name: str
    path: Path
    size: int
    source: dict[str, Any]


def folder(name: str) -> Path:
    """Where the model called `name` lies, or would lie."""
    return cache_dir() / "models" / name


def find(name: str) -> StoredModel | None:
    """The stored model called `name`, or None where there is none.

    Looks at the manifest alone; `verify` reads the files.

    Raises
    ------
    ModelError
        If the folder is there without a readable manifest.
    """
    path = folder(name)
    if not path.is_dir():
        return None
    manifest = _manifest(name, path)
    size = sum(entry["size"] for entry in manifest["files"].values())
    return StoredModel(name, path, size, manifest["source"])


def verify(model: StoredModel) -> None:
    """Compare every file with the manifest.

    Raises
    ------
    ModelError
        If a file is missing or differs; the message names it and the command that fetches the
        model again.
    """
    for name, entry in _manifest(model.name, model.path)["files"].items():
        file = model.path / name
        if not file.is_file():
            raise _damaged(model.name, file, "is missing")
        if file.stat().st_size != entry["size"]:
            size = f"has {file.stat().st_size} bytes instead of {entry['size']}"
            raise _damaged(model.name, file, size)
        if sha256(file) != entry["sha256"]:
            raise _damaged(model.name, file, "does not match its checksum")


def build(
    name: str, make: Callable[[Path], dict[str, Any]], *, replace: bool = False
) -> StoredModel:
    """Store what `make` writes into the folder it is given, and return the stored model.

    Two processes may call this at once: the second waits and uses what the first has built. A
    failure, or a kill, leaves the store as it was.

    Parameters
    ----------
    name : str
        The model's name in the store.
    make : callable
        Writes the model's files into a folder and returns a dict that describes their source.
    replace : bool
        Build again even where the model is stored already.
    """
    final = folder(name)
    with _lock(name):
        stored = None if replace else _find_whole(name)
        if stored is not None:
            return stored
        with _scratch(final) as scratch:
            part = scratch / name
            part.mkdir()
            source = make(part)
            _write_manifest(part, source)
            if final.exists():
                os.rename(final, scratch / "replaced")
            os.rename(part, final)
    stored = find(name)
    assert stored is not None
    return stored


def remove(name: str) -> bool:
    """Delete the stored model; False where there was none."""
    path = folder(name)
    if not path.is_dir():
        return False
    with _lock(name), _scratch(path) as scratch:
        os.rename(path, scratch / "removed")
    return True


def sha256(file: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _lock(name: str) -> FileLock:
    try:
        return FileLock(cache_folder("models") / f".{name}.lock")
    except CacheError as error:
        raise ModelError(str(error)) from error


def _find_whole(name: str) -> StoredModel | None:
    # A folder whose manifest is unreadable is as good as none to whoever is about to build it.
    try:
        return find(name)
    except ModelError:
        return None


@contextlib.contextmanager
def _scratch(final: Path) -> Iterator[Path]:
    """A folder beside `final`, on the same file system, gone afterwards."""
    prefix = f".{final.name}.part-"
    for stale in final.parent.glob(f"{prefix}*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=final.parent) as path:
        yield Path(path)


def _write_manifest(path: Path, source: dict[str, Any]) -> None:
    files = {
        file.name: {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(path.iterdir())
    }
    manifest = {"version": 1, "source": source, "files": files}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _manifest(name: str, path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
        assert isinstance(manifest["source"], dict)
        assert all({"size", "sha256"} <= entry.keys() for entry in manifest["files"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise _damaged(name, file, "cannot be read") from error
    return manifest


def _damaged(name: str, file: Path, what: str) -> ModelError:
    return ModelError(
        f"the stored model {name!r} is damaged: {file} {what}; "
        f"fetch it again with: metasd models fetch {name} --again"
    )
