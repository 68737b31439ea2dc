"""Each policy's first call of each kind works in a fresh process, whatever was compiled before.

A kernel takes its compiler options from whoever compiles it first; one that allocates once broke
where that was a caller compiled without reference counting.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from metasd_bandits import make_policy
policy = make_policy({name!r})
policy.reset(3, seed=0)
getattr(policy, {first!r})()
policy.update(policy.select(), 0.5)
assert abs(policy.probabilities().sum() - 1) < 1e-9
assert 0 < policy.decide().propensity <= 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["select", "decide", "probabilities"])
@pytest.mark.parametrize("name", ["thompson", "thompson:model=gaussian"])
def test_first_calls(name, first, tmp_path):
    script = SCRIPT.format(name=name, first=first)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "METASD_CACHE": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
