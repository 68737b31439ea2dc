"""The store: whole or not there, and every damaged byte is noticed."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from metasd_runtime.model import store
from metasd_runtime.model.store import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    return tmp_path / "models"


def make(folder: Path) -> dict[str, str]:
    (folder / "weights").write_bytes(bytes(range(256)) * 100)
    (folder / "config").write_text("{}")
    return {"package": "made here"}


def test_what_is_built_is_found_whole(cache):
    assert store.find("m") is None
    stored = store.build("m", make)
    assert stored == store.find("m")
    assert stored.size == 25602
    assert stored.source == {"package": "made here"}
    store.verify(stored)


def flip_first(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 128
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_first, flip_last_bit, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["weights", "config"])
def test_every_damage_is_named_with_its_cure(cache, damage, name):
    stored = store.build("m", make)
    damage(stored.path / name)
    with pytest.raises(ModelError, match=rf"m/{name} .*metasd models fetch m --again"):
        store.verify(stored)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {}}', '{"source": {}, "files": 3}'])
def test_an_unreadable_manifest_is_damage_and_is_built_over(cache, content):
    stored = store.build("m", make)
    (stored.path / "manifest.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be read; fetch it again"):
        store.find("m")
    store.verify(store.build("m", make))


def test_a_failed_build_leaves_the_store_as_it_was(cache):
    def fail(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        store.build("m", fail)
    assert store.find("m") is None
    stored = store.build("m", make)
    with pytest.raises(ConnectionError):
        store.build("m", fail, replace=True)
    store.verify(stored)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]


def test_build_uses_what_is_there_unless_told_to_replace(cache):
    store.build("m", make)

    def other(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("new")
        return {}

    assert store.build("m", other).size == 25602
    replaced = store.build("m", other, replace=True)
    assert replaced.size == 3
    store.verify(replaced)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]


def test_remove(cache):
    assert not store.remove("m")
    store.build("m", make)
    assert store.remove("m")
    assert store.find("m") is None
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_an_unwritable_cache_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the cache folder .* set METASD_CACHE"):
        store.build("m", make)


def _slow_make(folder: Path) -> dict[str, str]:
    with (folder.parent.parent.parent / "calls").open("a") as calls:
        calls.write("x")
    time.sleep(0.3)
    return make(folder)


def _build_in_child(queue) -> None:
    stored = store.build("m", _slow_make)
    store.verify(stored)
    queue.put(stored.size)


def _die_in_child() -> None:
    def killed(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("half")
        os._exit(9)

    store.build("m", killed)


@pytest.mark.slow
def test_processes_that_build_at_once_build_once(cache, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=_build_in_child, args=(queue,)) for _ in range(4)]
    for child in children:
        child.start()
    assert [queue.get(timeout=300) for _ in children] == [25602] * 4
    for child in children:
        child.join()
    assert (tmp_path / "calls").read_text() == "x"


def test_a_killed_build_is_swept_away_by_the_next(cache):
    child = multiprocessing.get_context("spawn").Process(target=_die_in_child)
    child.start()
    child.join()
    assert child.exitcode == 9
    assert store.find("m") is None
    assert [p for p in cache.iterdir() if p.is_dir()]  # the half-built folder
    store.verify(store.build("m", make))
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]
