"""Test-wide settings."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Numba does not notice that a kernel called from another file has changed, so tests compile into
# a cache of their own for each state of the sources. (Set before anything imports numba.)
_ROOT = Path(__file__).resolve().parent.parent
_sources = sorted(p for d in ("metasd_bandits", "sim") for p in (_ROOT / d).rglob("*.py"))
_digest = hashlib.sha256(b"".join(p.read_bytes() for p in _sources)).hexdigest()[:16]
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"metasd-numba-{os.getuid()}-{_digest}")
)

settings.register_profile(
    "metasd", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("metasd")

_REGISTRIES = {
    "metasd_bandits.registry": "POLICIES",
    "metasd_runtime.drafters.registry": "DRAFTERS",
    "sim.acceptance.registry": "ACCEPTANCE",
}


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """What a test or a page registers is gone behind it."""
    tables = [getattr(sys.modules[m], name) for m, name in _REGISTRIES.items() if m in sys.modules]
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
