"""Without a cache folder everything that can work does, and the rest says what to set."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType

import pytest

from metasd_bandits import make_policy
from metasd_bandits.cache import CacheError, cache_folder
from metasd_bandits.compiled.specialise import specialise

ROOT = Path(__file__).parents[2]

PLAY = """
from metasd_bandits import make_policy
for name in ("ucb", "exp3"):
    policy = make_policy(name)
    policy.reset(2, 0)
    for t in range(40):
        arm = policy.select()
        policy.update(arm, [0.2, 0.9][arm])
    print(policy.pulls.tolist())
"""


def run(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "METASD_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """Below a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_policies_play_as_ever_without_a_cache_and_warn_once(nowhere: Path, tmp_path: Path) -> None:
    without, with_cache = run("-c", PLAY, cache=nowhere), run("-c", PLAY, cache=tmp_path / "here")
    assert without.returncode == 0, without.stderr
    assert without.stdout == with_cache.stdout != ""
    assert with_cache.stderr == ""
    assert without.stderr.count("METASD_CACHE") == 1
    assert str(nowhere) in without.stderr


TEMPLATE = """
import gate
from metasd_bandits.compiled.stand_ins import select  # bound by specialise

gate.pass_through()
AFTER = 1
"""


def test_a_second_thread_waits_until_a_module_has_run_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entered, go = threading.Event(), threading.Event()
    gate = ModuleType("gate")
    gate.__dict__["pass_through"] = lambda: go.is_set() or (entered.set(), go.wait(60))
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    go.set()
    (tmp_path / "gated_template.py").write_text(TEMPLATE)
    template = importlib.import_module("gated_template")
    go.clear()
    kernel = make_policy("ucb").kernels()["select"]

    def bind() -> bool:
        return hasattr(specialise(template, select=kernel), "AFTER")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bind)
        assert entered.wait(60)
        second = pool.submit(bind)
        wait([second], timeout=0.2)  # time to go wrong in: one that waits is still waiting
        go.set()
        assert first.result()
        assert second.result()


@pytest.mark.parametrize("command", [["models", "fetch"], ["generate", "hello"]])
def test_commands_that_need_the_cache_name_the_variable(nowhere: Path, command: list[str]) -> None:
    done = run("-m", "metasd_runtime.cli", *command, cache=nowhere)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "METASD_CACHE" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    assert cache_folder("kernels").is_dir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as of a read-only disk, for root too
    with pytest.raises(CacheError, match=r"kernels.*METASD_CACHE"):
        cache_folder("kernels")
