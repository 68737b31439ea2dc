"""What docs/decoding.md promises by name exists."""

from __future__ import annotations

import re
from pathlib import Path

from metasd_runtime.drafters.registry import DRAFTERS

PAGE = Path(__file__).parents[2] / "docs" / "decoding.md"


def test_the_table_of_drafters_is_the_registry():
    rows = re.findall(r"^\| `([a-z-]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == set(DRAFTERS)
