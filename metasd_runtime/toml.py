"""Reading the TOML files that users write: suites, and pools to be trained."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from metasd_bandits import checks

__all__ = ["read_toml"]


def read_toml(path: Path, instead: str = "") -> dict[str, Any]:
    """What the file holds.

    Parameters
    ----------
    path : Path
    instead : str
        Said behind "there is no file PATH".

    Raises
    ------
    ConfigError
        If the file is not there, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise checks.ConfigError(f"there is no file {path}{instead}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise checks.ConfigError(f"{path} is not TOML: {error}") from None
