"""Training from prompts to pool: what goes wrong is said, what was done is not done again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from metasd_bandits.checks import ConfigError
from metasd_runtime.drafters.pool import load_pool, read_manifest
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model import load
from metasd_runtime.model.target import Target
from metasd_runtime.training import cli
from metasd_runtime.training.answers import Answerer, answer_all, read_answers
from metasd_runtime.training.config import read_config
from metasd_runtime.training.corpus import Text
from metasd_runtime.training.evaluate import _conditional, _decode
from metasd_runtime.training.pipeline import train_pool
from metasd_runtime.training.prompts import Prompt, load_prompts
from metasd_runtime.training.report import heat_map, matrix_table, write_matrix
from metasd_runtime.training.transfer import evaluate_on, prompts_of

CONFIG = """
target = "tiny"
[domains]
even = "even.jsonl"
odd = "odd.jsonl"
[data]
tokens = 150
held_out = 3
batch = 6
max_prompt_tokens = 20
max_new_tokens = 16
[head]
vocabulary = 24
[training]
shared_tokens = 200
tokens = 100
batch_tokens = 50
depths = 2
"""


def write_prompts(path: Path, texts: list[str]) -> None:
    rows = [json.dumps({"id": f"p{i}", "prompt": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pool.toml").write_text(CONFIG)
    write_prompts(tmp_path / "even.jsonl", ["aceg" + chr(97 + 2 * i) for i in range(12)])
    write_prompts(tmp_path / "odd.jsonl", ["bdfh" + chr(98 + 2 * i) for i in range(12)])
    return tmp_path


@pytest.fixture
def loaded(tiny_llama: Callable[..., Any], letters: Callable[[int], Any]) -> Any:
    model = tiny_llama(1, vocab=32, layers=3, sharpness=15.0)
    return SimpleNamespace(model=model, tokenizer=letters(32), name="tiny")


@pytest.mark.slow
def test_a_pool_is_trained_loaded_and_lossless(folder: Path, loaded: Any) -> None:
    told: list[str] = []
    config = read_config(folder / "pool.toml")
    pool = train_pool(config, loaded, folder / "out", lambda step, *rest: told.append(step))
    assert {"answers: even", "eagle: shared", "eagle: odd", "eagle: ofa", "evaluation"} <= set(told)
    assert list(pool.matrix) == ["eagle-even", "eagle-odd", "eagle-ofa"]
    manifest = read_manifest(folder / "out")
    assert [d["name"] for d in manifest["drafters"]] == ["eagle-even", "eagle-odd", "eagle-ofa"]
    assert manifest["training"]["data"]["even"]["held_out"] == 3
    assert manifest["training"]["settings"]["seed"] == 0
    drafters = load_pool(folder / "out", Target(loaded.model))
    ids = torch.tensor([[0, 2, 4, 6, 8]])
    output = MetaSD(loaded.model, drafters=drafters, reward="bd").generate(ids, max_new_tokens=40)
    assert torch.equal(output, loaded.model.generate(ids, max_new_tokens=40, do_sample=False))
    write_matrix(pool.matrix, folder / "matrix.csv")
    heat_map(pool.matrix, folder / "matrix.png")
    assert len((folder / "matrix.csv").read_text().splitlines()) == 1 + 3 * 2
    assert (folder / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert matrix_table(pool.matrix).row_count == 3


@pytest.mark.slow
def test_elsewhere_the_measure_is_the_same(folder: Path, loaded: Any) -> None:
    """On the very prompts that training held out, the pool's file gives the manifest's metrics."""
    config = read_config(with_kinds(folder, ["eagle", "medusa", "language-model"]))
    pool = train_pool(config, loaded, folder / "out", lambda *told: None)
    held_out = prompts_of([f"{name}={folder / name}.jsonl" for name in ("even", "odd")], 99)
    held_out = {name: texts[-3:] for name, texts in held_out.items()}
    matrix = evaluate_on(folder / "out", loaded, held_out, max_new_tokens=16)
    assert list(matrix) == list(pool.matrix)
    for name, row in pool.matrix.items():
        for domain, there in row.items():
            assert matrix[name][domain].agreement == pytest.approx(there.agreement)
            assert matrix[name][domain].divergence == pytest.approx(there.divergence, abs=1e-5)
            assert matrix[name][domain].tokens_per_round == there.tokens_per_round


@pytest.mark.parametrize("source", ["even", "=even.jsonl", "even=", "even=nowhere.jsonl"])
def test_sources_of_other_prompts_are_checked(source: str) -> None:
    with pytest.raises(ConfigError, match="names no prompts; write TASK=FILE"):
        prompts_of([source], 3)


KINDS = ["eagle", "medusa", "r-medusa", "bpd", "r-bpd", "language-model"]


def with_kinds(folder: Path, kinds: list[str]) -> Path:
    path = folder / "kinds.toml"
    path.write_text(f"kinds = {kinds}\n" + CONFIG)
    return path


@pytest.mark.slow
def test_every_kind_is_trained_loaded_and_lossless(folder: Path, loaded: Any) -> None:
    config = read_config(with_kinds(folder, KINDS))
    pool = train_pool(config, loaded, folder / "out", lambda *told: None)
    names = [f"{kind}-{part}" for kind in KINDS for part in ("even", "odd", "ofa")]
    assert list(pool.matrix) == names
    manifest = read_manifest(folder / "out")
    assert [d["name"] for d in manifest["drafters"]] == names
    assert manifest["drafters"][-1]["domains"] == ["even", "odd"]
    assert manifest["training"]["settings"]["kinds"] == KINDS
    drafters = load_pool(folder / "out", Target(loaded.model))
    assert [drafter.name for drafter in drafters] == names
    ids = torch.tensor([[1, 3, 5, 7, 9]])
    plain = loaded.model.generate(ids, max_new_tokens=40, do_sample=False)
    for drafter in drafters:
        metasd = MetaSD(loaded.model, drafters=[drafter], reward="bd", policy="fixed")
        output = metasd.generate(ids, max_new_tokens=40, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain), drafter.name
        assert sum(r.accepted for r in output.trace) > 0, drafter.name


@pytest.mark.slow
def test_without_specialists_there_is_one_of_each_kind_for_all(folder: Path, loaded: Any) -> None:
    path = with_kinds(folder, ["medusa", "r-medusa"])
    path.write_text(path.read_text() + "specialists = false\n")
    pool = train_pool(read_config(path), loaded, folder / "out", lambda *told: None)
    assert list(pool.matrix) == ["medusa-ofa", "r-medusa-ofa"]
    assert all(set(row) == {"even", "odd"} for row in pool.matrix.values())
    assert {p.stem for p in (folder / "out/work/states").iterdir()} == {
        "medusa-shared", "medusa-ofa"
    }  # fmt: skip
    drafters = load_pool(folder / "out", Target(loaded.model))
    assert [drafter.name for drafter in drafters] == list(pool.matrix)


class _InterruptedError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "step"),
    [
        (["eagle"], "answers: odd"),
        (["eagle"], "eagle: shared"),
        (["eagle"], "eagle: odd"),
        (["eagle"], "evaluation"),
        (["medusa", "r-medusa"], "medusa: even"),
        (["bpd", "language-model"], "language-model: shared"),
    ],
)
def test_an_interrupted_pool_continues_to_the_same_weights(
    folder: Path, loaded: Any, kinds: list[str], step: str
) -> None:
    config = read_config(with_kinds(folder, kinds))

    def interrupt(at: str, done: int, total: int, remark: str) -> None:
        if at == step and done > 1:
            raise _InterruptedError

    with pytest.raises(_InterruptedError):
        train_pool(config, loaded, folder / "parts", interrupt)
    for out in ("parts", "whole"):
        train_pool(config, loaded, folder / out, lambda *told: None)
    whole, parts = ((folder / out / "pool.safetensors").read_bytes() for out in ("whole", "parts"))
    assert whole == parts


def test_a_folder_begun_with_other_settings_is_refused(folder: Path, loaded: Any) -> None:
    path = folder / "pool.toml"
    train_pool(read_config(path), loaded, folder / "out", lambda *told: None)
    path.write_text(CONFIG.replace("vocabulary = 24", "vocabulary = 20"))
    with pytest.raises(ConfigError, match="begun with head"):
        train_pool(read_config(path), loaded, folder / "out", lambda *told: None)


def test_a_folder_begun_before_a_setting_existed_goes_on_with_its_default(
    folder: Path, loaded: Any
) -> None:
    path = folder / "pool.toml"
    train_pool(read_config(path), loaded, folder / "out", lambda *told: None)
    begun = folder / "out" / "work" / "settings.json"
    settings = json.loads(begun.read_text())
    del settings["training"]["specialists"], settings["kinds"], settings["language_model"]
    begun.write_text(json.dumps(settings))
    config = read_config(path)
    changed = dataclasses.replace(config.training, specialists=False)
    other = dataclasses.replace(config, training=changed)
    with pytest.raises(ConfigError, match="begun with training"):
        train_pool(other, loaded, folder / "out", lambda *told: None)
    train_pool(config, loaded, folder / "out", lambda *told: None)


def test_answers_torn_by_a_crash_are_made_again(loaded: Any, tmp_path: Path) -> None:
    prompts = {"d": [Prompt(str(i), [i % 5, 3]) for i in range(20)]}

    def answer() -> str:
        answerer = Answerer(loaded.model, {1}, 10)
        answer_all(answerer, prompts, tmp_path, held_out=2, batch=4, tokens=60, seed=3)
        return (tmp_path / "d.jsonl").read_text()

    whole = answer()
    for cut in (1, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        (tmp_path / "d.jsonl").write_text(whole[:cut])
        assert answer() == whole
    assert len(read_answers(tmp_path / "d.jsonl")) == whole.count("\n")


def test_answering_stops_at_the_budget_and_the_domains_advance_together(
    loaded: Any, tmp_path: Path
) -> None:
    prompts = {n: [Prompt(str(i), [i % 7, 3]) for i in range(40)] for n in ("a", "b")}
    told: list[tuple[str, int]] = []
    answer_all(
        Answerer(loaded.model, {1}, 10),
        prompts,
        tmp_path,
        held_out=2,
        batch=5,
        tokens=120,
        seed=0,
        progress=lambda name, done: told.append((name, done)),
    )
    last = dict(told)
    assert all(120 <= done < 120 + 5 * 10 for done in last.values())
    at = {"a": 0, "b": 0}
    for name, done in told:
        other = "b" if name == "a" else "a"
        assert at[name] <= at[other]
        at[name] = done


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "domain 'even' is empty"),
        (["a" * 30, "b" * 40], r"all 2 exceed 20 tokens; raise data.max_prompt_tokens"),
        (["ab", "cd"], r"has 2 prompts and 3 are to be held out"),
    ],
)
def test_domains_without_text_are_refused(
    folder: Path, loaded: Any, prompts: list[str], message: str
) -> None:
    write_prompts(folder / "even.jsonl", prompts)
    config = read_config(folder / "pool.toml")
    with pytest.raises(ConfigError, match=message):
        train_pool(config, loaded, folder / "out", lambda *told: None)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[1, 2]", r"head.layers=\[1, 2\] must ascend to 3, the target's last"),
        ("[3, 1, 3]", "must ascend to 3"),
        ("[0, 3]", r"head.layers=0 is out of range; give an integer in \[1, 3\]"),
        ("['a']", "head.layers='a' is not an integer"),
    ],
)
def test_hidden_states_that_do_not_end_with_the_last_are_refused(
    folder: Path, loaded: Any, layers: str, message: str
) -> None:
    path = folder / "pool.toml"
    path.write_text(CONFIG.replace("[head]", f"[head]\nlayers = {layers}"))
    with pytest.raises(ConfigError, match=message):
        train_pool(read_config(path), loaded, folder / "out", lambda *told: None)


def test_a_language_model_that_does_not_fit_the_target_is_refused(
    folder: Path, loaded: Any
) -> None:
    path = with_kinds(folder, ["language-model"])
    path.write_text(path.read_text() + "[language_model]\nwidth = 64\n")
    with pytest.raises(ConfigError, match=r"language_model.width=64 is out of range"):
        train_pool(read_config(path), loaded, folder / "out", lambda *told: None)


def test_long_prompts_are_left_out_with_a_warning(folder: Path, loaded: Any) -> None:
    write_prompts(folder / "even.jsonl", ["ab", "a" * 30, "cd"])
    with pytest.warns(RuntimeWarning, match="1 of 3 prompts exceed 20 tokens"):
        kept = load_prompts("even", str(folder / "even.jsonl"), loaded.tokenizer, 20)
    assert [prompt.id for prompt in kept] == ["p0", "p2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', 'line 1 has no "prompt"'),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "the id '1'; ids must differ"),
    ],
)
def test_malformed_prompts_are_refused(folder: Path, loaded: Any, line: str, message: str) -> None:
    (folder / "bad.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        load_prompts("bad", str(folder / "bad.jsonl"), loaded.tokenizer, 20)


def test_a_missing_file_is_not_taken_for_a_dataset(loaded: Any) -> None:
    for source in ("nowhere.jsonl", "/nowhere/code.jsonl", "./nowhere"):
        with pytest.raises(ConfigError, match="there is no file"):
            load_prompts("code", source, loaded.tokenizer, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tokens = 150", "tokens = 0"), "data.tokens=0 is out of range"),
        (("[head]", "[haed]"), "unknown setting 'haed'; did you mean 'head'"),
        (("held_out", "heldout"), "did you mean 'held_out'"),
        (('even = "even.jsonl"', "even = 3"), "domains must be a table"),
        (("[domains]", "[domains"), "is not TOML"),
        (("even =", "ofa ="), "'ofa' cannot be a name"),
        (("depths = 2", "depths = 2\nrate = 2"), "training.rate=2 is outside"),
        (("depths = 2", "specialists = 1"), "training.specialists=1 must be true or false"),
        (("[domains]", "kinds = 'eagle'\n[domains]"), r"kinds='eagle' must be a list of names"),
        (("[domains]", "kinds = []\n[domains]"), r"kinds=\[\] must name kinds of drafters"),
        (("[domains]", "kinds = ['bpd', 'bpd']\n[domains]"), "each once; there are eagle, medusa"),
        (("[domains]", "kinds = ['medsa']\n[domains]"), "did you mean 'medusa'"),
        (("[domains]", "kinds = ['r-bpd']\n[domains]"), "rescores the heads of 'bpd'.*add it"),
        (("vocabulary = 24", "positions = 0"), r"head.positions=0 is out of range"),
        (("[head]", "[language_model]\ndepth = 0\n[head]"), r"language_model.depth=0 is out of"),
    ],
)
def test_bad_settings_are_refused(folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "pool.toml").write_text(CONFIG.replace(*change, 1))
    with pytest.raises(ConfigError, match=message):
        read_config(folder / "pool.toml")


def test_greedy_rounds_are_counted_as_decoding_goes() -> None:
    match = torch.tensor(
        [  # row: draft position; column: token of the text
            [1, 0, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 1, 0, 0, 0],
        ],
        dtype=torch.bool,
    )
    # Tokens 0, 1 accepted and 2 added; 3, 4 accepted and 5, behind the text's end, added.
    assert _decode(match, 5) == (2, 5)
    # Blocks that begin at 0..4 agree at position 1 in 3 of 5; of those with a second, all 3.
    assert _conditional([match[:, :5]]) == [3 / 5, 2 / 3]


def test_texts_know_their_answers() -> None:
    assert Text([1, 2, 3], 2, Path("x"), 0).tokens[-2:] == [2, 3]


def test_the_commands(folder: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_target", lambda *args, **options: loaded)
    run = CliRunner()
    out = folder / "out"
    done = run.invoke(cli.app, ["train", str(folder / "pool.toml"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "matrix.csv").exists()
    assert (out / "matrix.png").exists()
    shown = run.invoke(cli.app, ["pool", str(out)])
    assert shown.exit_code == 0
    assert "eagle-ofa" in shown.output
    assert "3 prompts held out" in shown.output
    source = f"letters={folder / 'even.jsonl'}"
    elsewhere = run.invoke(cli.app, ["pool", str(out), "--on", source, "--prompts", "2"])
    assert elsewhere.exit_code == 0, elsewhere.output
    assert "letters" in elsewhere.output
    wrong = run.invoke(cli.app, ["pool", str(out), "--on", f"{source}#numbers"])
    assert wrong.exit_code == 1
    assert "numbers" in wrong.output
    (folder / "pool.toml").write_text("[domains]\n")
    failed = run.invoke(cli.app, ["train", str(folder / "pool.toml"), "--out", str(out)])
    assert failed.exit_code == 1
    assert "there are no domains" in failed.output
    missing = run.invoke(cli.app, ["pool", str(folder / "nothing")])
    assert missing.exit_code == 1
    assert "is no pool of drafters" in missing.output
