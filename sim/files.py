"""JSON files that are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["save_json"]


def save_json(content: Any, path: Path) -> None:
    """Write beside the name, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
