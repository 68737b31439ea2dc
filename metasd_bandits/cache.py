"""Where MetaSD keeps what it can make again: compiled kernels, fetched and converted models."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import platformdirs

__all__ = ["CacheError", "cache_dir", "cache_folder"]


class CacheError(OSError):
    """The cache cannot be written; the message names the folder and the variable to set."""


def cache_dir() -> Path:
    """The cache folder: ``$METASD_CACHE`` where it is set, else the platform's user cache."""
    override = os.environ.get("METASD_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("metasd")


def cache_folder(name: str) -> Path:
    """A folder of the cache, made where it is not there.

    Raises
    ------
    CacheError
        If it cannot be made or written.
    """
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CacheError(
            f"cannot write the cache folder {folder} ({error.strerror}); "
            "set METASD_CACHE to a folder that can be written"
        ) from error
    return folder
