"""Other packages beside ours: what their process is asked and says, what becomes of it.

Neither package is in this environment: stand-ins with their interface play them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from bench_suites import PEERS_SUITE, FakePeers, fake_python, measure, write_suite

from metasd_bandits import ConfigError
from metasd_runtime import cli
from metasd_runtime.bench.page import write_report
from metasd_runtime.bench.peers import Peers, RefusedError
from metasd_runtime.bench.results import Results, read_results
from metasd_runtime.bench.suite import PEERS, find_suite, read_suite
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.load import LoadedModel, load_target

VOCAB = 26
ROWS = [[1, 2, 3, 1, 2, 3, 1], [4, 5]]

# What the worker uses of each package, over the library's own loop.
_GREEDY = """
import torch

def emitted(model, ids, new, ends):
    row = ids.view(-1).tolist()
    out = []
    with torch.no_grad():
        while len(out) < new and not (out and out[-1] in ends):
            out.append(int(model(torch.tensor([row + out])).logits[0, -1].argmax()))
    return out
"""
_ECONOMIZE = """
from types import SimpleNamespace
from greedy import emitted, torch

def DecodeConfig(cycle_length):
    assert cycle_length == 6  # an exact token and 5 drafts

def apply(model, technique, decoding):
    def decode_batch(prompts, new, stop):
        return [SimpleNamespace(tokens=torch.tensor(emitted(model, p, new, stop))) for p in prompts]
    return SimpleNamespace(decode_batch=decode_batch)
"""
_FLASHSPEC = """
from types import SimpleNamespace
from greedy import emitted, torch

FlashSpecConfig = BanditConfig = SamplingConfig = SimpleNamespace

class SpeculativeEngine:
    def __init__(self, config, drafters, target):
        assert config.sampling.gamma == 5
        self.model = target.model

    def generate(self, ids, max_new_tokens, eos_token_ids):
        print("flashspec talks")  # must not come between the answers
        out = emitted(self.model, ids, max_new_tokens, eos_token_ids)
        filled = out + [-1] * (max_new_tokens - len(out))
        return SimpleNamespace(output_ids=torch.tensor([filled]))
"""
_FILES = {
    "greedy.py": _GREEDY,
    "economize/__init__.py": _ECONOMIZE,
    "economize/techniques/__init__.py": "",
    "economize/techniques/lookup.py": "class LookupConfig: pass",
    "flashspec/__init__.py": _FLASHSPEC,
    "flashspec/engine/__init__.py": "",
    "flashspec/engine/ngram.py": "class NgramDrafter: pass",
    "flashspec/engine/verifier.py": (
        "class TargetModel:\n    def __init__(self, *a, model): self.model = model"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_llama, letters) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(seed=1, vocab=VOCAB, layers=4).save_pretrained(folder)
    letters(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(model) -> LoadedModel:
    return load_target(model, dtype="float32")


def test_the_worker_gives_the_emitted_tokens_alone(loaded, tmp_path, monkeypatch):
    for name, text in _FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    plain = MetaSD(loaded.model, drafters=["none"])
    full = [output.new_tokens for output in plain.generate_many(ROWS, max_new_tokens=9)]
    end = full[0][4]
    cut = [row[: row.index(end) + 1] if end in row else row for row in full]
    assert len(cut[0]) < 9
    with Peers(sys.executable, loaded) as peers:
        assert peers.run("economize", ROWS, 9)[0] == full
        assert peers.run("economize", ROWS, 9, {end})[0] == cut
        assert peers.run("flashspec", ROWS[:1], 9)[0] == full[:1]
        outputs, seconds = peers.run("flashspec", ROWS[:1], 9, {end})
        assert outputs == cut[:1]
        assert seconds > 0
        with pytest.raises(RefusedError, match="one prompt at a time"):
            peers.run("flashspec", ROWS, 9)
        assert peers.run("economize", ROWS, 2)[0] == [row[:2] for row in full]  # goes on


def test_a_peer_that_is_not_installed_refuses_by_name(loaded):
    """This environment has neither of them."""
    with Peers(sys.executable, loaded) as peers:
        for engine in PEERS:
            with pytest.raises(RefusedError, match=f"No module named '{engine}'"):
                peers.run(engine, ROWS, 4)


def test_a_process_that_ends_says_its_last_words(loaded, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\n")
    python.chmod(0o755)
    with Peers(str(python), loaded) as peers, pytest.raises(RefusedError, match="no torch here"):
        peers.run("economize", ROWS, 4)


def test_a_process_that_cannot_be_started_is_refused_in_a_sentence(loaded, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*No such file.*economize and flashspec"):
        Peers(str(tmp_path / "nowhere"), loaded)
    with pytest.raises(ConfigError, match=r"'owner/name' is not; download"):
        Peers(sys.executable, LoadedModel(loaded.model, None, "owner/name", None))


def test_a_peer_takes_no_settings(tmp_path):
    text = PEERS_SUITE.replace('"economize" }', '"economize", num_tokens = 3 }')
    with pytest.raises(ConfigError, match=r"'economize lookup'.*'num_tokens'.*remove it"):
        read_suite(write_suite(tmp_path, text))


def test_peers_take_turns_with_everybody_and_are_compared(tmp_path, model):
    measure(model, write_suite(tmp_path, PEERS_SUITE), tmp_path / "out", peers=FakePeers)
    results = read_results(tmp_path / "out")
    assert results.finished
    names = list(dict.fromkeys(line["method"] for line in results.lines))
    assert names[-2:] == ["economize lookup", "flashspec lookup"]
    assert [line["method"] for line in results.lines] == names * 6  # in turn, prompt by prompt
    [view] = results.views()
    for name in names[-2:]:
        assert [x["output"] for x in view.of(name)] == [x["output"] for x in view.of("plain")]
        assert all(x["kind"] == "peer" and x["difference"] is None for x in view.of(name))
    _, tables = write_report(results)
    for title in ("Speed-up", "Speed against generate", "Greedy answers equal"):
        [table] = [t for t in tables if t.title.startswith(title)]
        assert {"economize lookup", "flashspec lookup"} < {row[0] for row in table.rows}


def test_a_wrong_answer_counts_as_a_difference_but_not_as_a_fault_of_ours(
    tmp_path, model, monkeypatch, capsys
):
    path = write_suite(tmp_path, PEERS_SUITE)
    python, out = fake_python(tmp_path), tmp_path / "out"
    arguments = ["bench", path, "--target", model, "--peers", python, "--output", out]
    monkeypatch.setattr("sys.argv", ["metasd", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    said = capsys.readouterr().err
    assert "flashspec lookup takes no part at temperature 0, batch 1: no such module" in said
    results = read_results(out)
    assert results.finished
    [view] = results.views()
    assert "flashspec lookup" not in view.methods()
    for wrong, plain in zip(view.of("economize lookup"), view.of("plain"), strict=True):
        assert wrong["output"] == [[0] * 12]
        assert wrong["difference"] == next(i for i, t in enumerate(plain["output"][0]) if t)
        assert wrong["gap"] > 0
    row = next(x for x in (out / "tables.md").read_text().splitlines() if "0 of 6" in x)
    assert row.startswith("| economize lookup | 0 of 6 |")


def test_whoever_refuses_a_setting_is_left_out_of_it_alone(tmp_path, model, capfd):
    def one_at_a_time(engine, rows):
        if engine == "flashspec" and len(rows) > 1:
            raise RefusedError("one at a time")

    dimensions = "temperatures = [0.0, 1.0]\nbatches = [1, 2]\nseeds = [0, 1]\n"
    path = write_suite(tmp_path, dimensions + PEERS_SUITE)
    made = lambda loaded: FakePeers(loaded, one_at_a_time)  # noqa: E731
    measure(model, path, tmp_path / "out", peers=made)
    results = read_results(tmp_path / "out")
    assert results.finished
    took_part = {
        (x["method"], x["temperature"], x["batch"]) for x in results.lines if x["kind"] == "peer"
    }
    assert took_part == {
        ("economize lookup", 0, 1),
        ("economize lookup", 0, 2),
        ("flashspec lookup", 0, 1),
    }
    assert not [x for x in results.lines if x["kind"] == "peer" and x["difference"] is not None]
    said = re.findall(
        r"(\w+) lookup takes no part at temperature (\d), batch (\d)", capfd.readouterr().err
    )
    expected = [(e, "1", b) for e in PEERS for b in "12"] + [("flashspec", "0", "2")]
    assert sorted(said) == sorted(expected)  # once for both seeds


def test_without_peers_they_are_left_out_in_a_line(tmp_path, model, capfd):
    measure(model, write_suite(tmp_path, PEERS_SUITE), tmp_path / "out")
    [line] = [x for x in capfd.readouterr().err.splitlines() if "left out" in x]
    assert "economize lookup, flashspec lookup left out: --peers PYTHON" in line
    results = read_results(tmp_path / "out")
    assert results.finished
    assert not [x for x in results.lines if x["kind"] == "peer"]


def test_plain_decoding_alone_can_be_shown(tmp_path, model):
    only = [x for x in PEERS_SUITE.splitlines() if '"generate"' not in x and '"UCB"' not in x]
    path = write_suite(tmp_path, "\n".join(only))
    assert {method.engine for method in read_suite(path).methods} == set(PEERS)
    measure(model, path, tmp_path / "out")
    results = read_results(tmp_path / "out")
    assert {x["method"] for x in results.lines} == {"plain"}
    write_report(results)


def test_a_run_goes_on_with_peers_and_without(tmp_path, model):
    path, out = write_suite(tmp_path, PEERS_SUITE), tmp_path / "out"
    file = out / "results.jsonl"
    measure(model, path, tmp_path / "whole", peers=FakePeers)
    whole = read_results(tmp_path / "whole")

    with pytest.raises(KeyboardInterrupt):
        measure(model, path, out, stop_at=13, peers=FakePeers)  # two prompts and a half
    begun = file.read_text().splitlines()[1:]
    peers = sum(json.loads(line)["kind"] == "peer" for line in begun)
    assert peers == 4

    measure(model, path, out)  # the rest of the prompts, without them
    without = read_results(out)
    assert without.finished
    assert len(without.lines) == len(whole.lines) - 12 + peers
    assert file.read_text().splitlines()[1:14] == begun

    measure(model, path, out, peers=FakePeers)  # and now theirs
    results = read_results(out)
    assert results.finished
    assert _outputs(results) == _outputs(whole)


def _outputs(results: Results) -> dict[tuple[str, str], list[list[int]]]:
    return {(x["prompt"], x["method"]): x["output"] for x in results.lines}


def test_a_peer_that_fails_on_the_way_takes_no_further_part(tmp_path, model, capfd):
    asked = []

    def fails(engine, rows):
        asked.append(engine)
        if engine == "economize" and asked.count(engine) > 3:  # warm-up and two prompts
            raise RefusedError("out of memory")

    path, out = write_suite(tmp_path, PEERS_SUITE), tmp_path / "out"
    measure(model, path, out, peers=lambda loaded: FakePeers(loaded, fails))
    assert (
        capfd.readouterr().err.count("economize lookup takes no further part from one/1 on: out")
        == 1
    )
    results = read_results(out)
    [view] = results.views()
    assert not results.finished
    assert [len(view.of(name)) for name in ("plain", "economize lookup", "flashspec lookup")] == [
        6,
        2,
        6,
    ]
    measure(model, path, out, peers=FakePeers)  # the same command once more
    assert read_results(out).finished


def test_spec_bench_short_has_both():
    suite = read_suite(find_suite("spec-bench-short"))
    named = {method.name: method.engine for method in suite.methods if method.engine in PEERS}
    assert named == {f"{engine} prompt lookup": engine for engine in PEERS}
