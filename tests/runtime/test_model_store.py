"""The store: whole or not there, and every damaged byte is noticed."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from metasd_runtime import model_store
from metasd_runtime.model_store import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    return tmp_path / "models"


def make(folder: Path) -> dict[str, str]:
    (folder / "weights").write_bytes(bytes(range(256)) * 100)
    (folder / "config").write_text("{}")
    return {"package": "made here"}


def test_what_is_built_is_found_whole(cache):
    assert model_store.find("m") is None
    stored = model_store.build("m", make)
    assert stored == model_store.find("m")
    assert stored.size == 25602
    assert stored.source == {"package": "made here"}
    model_store.verify(stored)


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
    stored = model_store.build("m", make)
    damage(stored.path / name)
    with pytest.raises(ModelError, match=rf"m/{name} .*metasd models fetch m --again"):
        model_store.verify(stored)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {}}', '{"source": {}, "files": 3}'])
def test_an_unreadable_manifest_is_damage_and_is_built_over(cache, content):
    stored = model_store.build("m", make)
    (stored.path / "manifest.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be read; fetch it again"):
        model_store.find("m")
    model_store.verify(model_store.build("m", make))


def test_a_failed_build_leaves_the_store_as_it_was(cache):
    def fail(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        model_store.build("m", fail)
    assert model_store.find("m") is None
    stored = model_store.build("m", make)
    with pytest.raises(ConnectionError):
        model_store.build("m", fail, replace=True)
    model_store.verify(stored)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]


def test_build_uses_what_is_there_unless_told_to_replace(cache):
    model_store.build("m", make)

    def other(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("new")
        return {}

    assert model_store.build("m", other).size == 25602
    replaced = model_store.build("m", other, replace=True)
    assert replaced.size == 3
    model_store.verify(replaced)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]


def test_remove(cache):
    assert not model_store.remove("m")
    model_store.build("m", make)
    assert model_store.remove("m")
    assert model_store.find("m") is None
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_an_unwritable_cache_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the cache folder .* set METASD_CACHE"):
        model_store.build("m", make)


def _slow_make(folder: Path) -> dict[str, str]:
    with (folder.parent.parent.parent / "calls").open("a") as calls:
        calls.write("x")
    time.sleep(0.3)
    return make(folder)


def _build_in_child(queue) -> None:
    stored = model_store.build("m", _slow_make)
    model_store.verify(stored)
    queue.put(stored.size)


def _die_in_child() -> None:
    def killed(folder: Path) -> dict[str, str]:
        (folder / "weights").write_text("half")
        os._exit(9)

    model_store.build("m", killed)


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
    assert model_store.find("m") is None
    assert [p for p in cache.iterdir() if p.is_dir()]  # the half-built folder
    model_store.verify(model_store.build("m", make))
    assert [p.name for p in cache.iterdir() if p.is_dir()] == ["m"]
