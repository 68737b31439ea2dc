"""Where MetaSD keeps what it can make again: compiled kernels, fetched and converted models."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The cache folder: ``$METASD_CACHE`` where it is set, else the platform's user cache."""
    override = os.environ.get("METASD_CACHE")
    return Path(override) if override else platformdirs.user_cache_path("metasd")
