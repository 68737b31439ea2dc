"""metasd-replay from the outside: answers, JSON, pictures, and one sentence for every mistake."""

import json

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from metasd_bandits import Trace, make_policy, read_trace
from metasd_bandits.replay.cli import app
from metasd_bandits.replay.coverage import interval_coverage
from metasd_bandits.replay.curves import replay_curves
from metasd_bandits.replay.full import full_replay
from metasd_bandits.traces.columns import ColumnReader, concatenated
from metasd_bandits.traces.parquet import convert
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader

LAW = SyntheticLog(queries=30, rounds=20, steps=(1.0, 1.1, 1.5), seed=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    convert(SyntheticReader(LAW), path / "full.parquet")
    logged = SyntheticLog(queries=30, rounds=20, logger=(0.2, 0.3, 0.5), full=False)
    convert(SyntheticReader(logged), path / "logged.jsonl")
    return path


FILES = (".parquet", ".jsonl", ".png", ".gif", ".csv", ".vw", ".txt")


def run(folder, *words):
    return CliRunner().invoke(app, [str(folder / w) if w.endswith(FILES) else w for w in words])


def answer(folder, *words):
    result = run(folder, *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_summarize(folder):
    found = answer(folder, "summarize", "full.parquet")
    assert (found["rounds"], found["queries"], found["full-information rounds"]) == (600, 30, 600)
    assert found["can answer"] == ["full replay", "rejection replay", "estimation"]
    assert sum(arm["rounds"] for arm in found["arms"]) == 600
    logged = answer(folder, "summarize", "logged.jsonl")
    assert logged["can answer"] == ["rejection replay", "estimation"]
    assert "lack the other arms' rewards" in logged["cannot answer"]["full replay"]
    text = run(folder, "summarize", "logged.jsonl").output
    assert "drafter-2" in text
    assert "full replay: no, 600 of 600 rounds" in text


def test_evaluate_says_what_the_library_says(folder):
    found = answer(folder, "evaluate", "full.parquet", "ucb", "--method", "full", "--tokens", "25")
    direct = full_replay(SyntheticReader(LAW), "ucb", tokens=25)
    values = {e["quantity"]: e["value"] for e in found["estimates"]}
    assert values == {q: e.value for q, e in direct.estimates.items()}
    assert found["shares"]["drafter-2"] == direct.shares[2]
    words = ("evaluate", "full.parquet", "ucb", "--method", "full", "--tokens", "15", "--regret")
    regret = [e for e in answer(folder, *words)["estimates"] if e["quantity"].startswith("regret")]
    assert [e["quantity"].split()[2] for e in regret] == ["rounds", "steps"]
    assert 0 < regret[0]["low"] < regret[0]["value"]
    for method in ("ips", "snips", "clipped-ips", "dr"):
        found = answer(folder, "evaluate", "logged.jsonl", "drafter-1", "--method", method)
        assert {e["method"] for e in found["estimates"]} == {method}
    rejected = answer(folder, "evaluate", "logged.jsonl", "ucb", "--method", "rejection")
    assert 0 < rejected["estimates"][0]["accepted"] < 600
    text = run(folder, "evaluate", "full.parquet", "ucb", "--method", "full", "--tokens", "99")
    assert "rounds to 99 tokens: not told" in text.output


def test_compare(folder):
    words = ("compare", "full.parquet", "uniform", "ucb:beta=0.1", "drafter-2", "--seeds", "2")
    found = answer(folder, *words)
    gap = found["policies"][2]["minus first"][0]
    assert gap["quantity"] == "reward per round"
    assert 0 < gap["low"] < gap["value"] < gap["high"]
    assert "minus uniform" in run(folder, *words).output


def test_convert_and_back(folder):
    assert answer(folder, "convert", "full.parquet", "back.jsonl")["rounds"] == 600
    assert len(read_trace(folder / "back.jsonl")) == 600
    (folder / "log.csv").write_text(
        "item_id,position,click,propensity_score\n1,1,0,0.5\n2,1,1,0.5\n"
    )
    assert answer(folder, "convert", "log.csv", "log.parquet", "--from", "obd")["rounds"] == 2
    (folder / "log.vw").write_text("1:3:0.5 | a\n2:1:0.5 | b\n")
    words = ("convert", "log.vw", "vw.parquet", "--from", "vw", "--costs", "0,4")
    assert answer(folder, *words)["rounds"] == 2


def test_interleaved_queries_are_sorted_on_request(folder):
    rounds = sorted(SyntheticReader(LAW).rounds(), key=lambda r: r.index)
    convert(Trace(LAW.header, rounds), folder / "mixed.parquet")
    refused = run(folder, "evaluate", "mixed.parquet", "ucb", "--method", "full")
    assert refused.exit_code == 2
    assert "--by-query" in refused.output
    answer(folder, "convert", "mixed.parquet", "sorted.parquet", "--by-query")
    words = ("ucb", "--method", "full")
    assert answer(folder, "evaluate", "sorted.parquet", *words) == answer(
        folder, "evaluate", "full.parquet", *words
    )


@pytest.mark.parametrize("kind", ["reward", "regret", "shares", "coverage", "support"])
def test_pictures_are_drawn_and_their_numbers_told(folder, kind):
    policies = [] if kind in ("coverage", "support") else ["ucb", "drafter-2"]
    words = ("plot", "full.parquet", f"{kind}.png", *policies, "--kind", kind, "--logs", "3")
    found = answer(folder, *words)
    assert (folder / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    if kind == "regret":
        ucb, best = found["policies"]
        assert ucb["mean"][-1] > 0
        assert best["mean"] == [0.0] * 20
        assert len(ucb["rounds"]) == 20
    if kind == "shares":
        columns = zip(*found["policies"][0]["shares"].values(), strict=True)
        assert [sum(c) for c in columns] == pytest.approx([1.0] * 20)
    if kind == "coverage":
        assert set(found["covered"]) == {"ips", "snips", "clipped-ips", "dr"}


def test_curves_end_where_full_replay_does():
    for scope in ("query", "carried"):
        curves = replay_curves(SyntheticReader(LAW), "ucb", scope=scope, seeds=(0, 1))
        whole = full_replay(SyntheticReader(LAW), "ucb", scope=scope, seeds=(0, 1))
        assert curves.reward.mean[-1] == pytest.approx(whole["reward per round"].value)
        assert curves.shares.mean(axis=0) == pytest.approx(whole.shares)
        best = full_replay(SyntheticReader(LAW), f"fixed:arm={curves.best_arm}")
        lost = 20 * (best["reward per round"].value - whole["reward per round"].value)
        assert curves.regret.mean[-1] == pytest.approx(lost)
    long = SyntheticLog(queries=2, rounds=1001, seed=1)
    curves = replay_curves(SyntheticReader(long), make_policy("uniform"), seeds=(0, 1, 2))
    assert len(curves.rounds) <= 200
    assert curves.rounds[-1] == 1001


def test_bands_are_students_over_queries_however_few():
    reader = SyntheticReader(SyntheticLog(queries=4, rounds=30, spread=1.0))
    curve = replay_curves(reader, "fixed:arm=1", level=0.9).reward
    x = concatenated(reader.batches(("rewards",))).per_arm["rewards"][1].reshape(4, 30).mean(axis=1)
    want = scipy.stats.t.interval(0.9, 3, x.mean(), scipy.stats.sem(x))
    assert (curve.low[-1], curve.high[-1]) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("queries", "scope"), [(1, "query"), (30, "carried")])
def test_no_band_where_nothing_tells_one(tmp_path, queries, scope):
    law = SyntheticLog(queries=queries, rounds=20)
    convert(SyntheticReader(law), tmp_path / "t.parquet")
    words = ("plot", "t.parquet", "p.png", "ucb", "--kind", "reward", "--scope", scope)
    [ucb] = answer(tmp_path, *words)["policies"]
    assert ucb["low"] == ucb["high"] == [None] * 20
    assert all(0.0 <= x <= 1.0 for x in ucb["mean"])


def test_a_missing_interval_is_explained(folder):
    words = ("full.parquet", "ucb", "--scope", "carried")
    for text in (
        run(folder, "evaluate", *words, "--method", "full").output,
        run(folder, "compare", *words, "uniform").output,
    ):
        assert " none " in text
        assert "note: no interval: the policy learns across queries" in text


def test_coverage_is_tried_on_logs_of_as_many_queries_as_asked(folder):
    words = ("plot", "full.parquet", "c.png", "drafter-1", "--kind", "coverage", "--logs", "9")
    found = answer(folder, *words, "--queries", "3")
    direct = interval_coverage(
        SyntheticReader(LAW), "drafter-1", levels=found["levels"], n_logs=9, queries=3
    )
    assert found["covered"] == {m: c.tolist() for m, c in direct.items()}


MISTAKES = [
    (("summarize", "nowhere.parquet"), "nowhere.parquet: there is no such file"),
    (("summarize", "note.txt"), "is no trace"),
    (("evaluate", "full.parquet", "unifrm", "--method", "full"), "mean 'uniform'"),
    (("evaluate", "full.parquet", "ucb:beta=-1", "--method", "full"), "beta=-1 is outside"),
    (("evaluate", "full.parquet", "ucb", "--method", "ipz"), "did you mean 'ips'"),
    (("evaluate", "full.parquet", "ucb", "--method", "dr"), "'ucb' learns"),
    (("evaluate", "logged.jsonl", "ucb", "--method", "full"), "record with --shadow"),
    (("evaluate", "full.parquet", "ucb", "--method", "full", "--seeds", "0"), "seeds=0"),
    (("evaluate", "full.parquet", "ucb", "--method", "full", "--scope", "no"), "unknown scope"),
    (("evaluate", "full.parquet", "ucb", "--method", "full", "--level", "2"), "level=2"),
    (("evaluate", "full.parquet", "ucb", "--method", "full", "--tokens", "0"), "tokens=0"),
    (("evaluate", "full.parquet", "ucb", "--method", "full", "--regret"), "needs"),
    (("compare", "full.parquet", "ucb"), "two policies or more"),
    (("convert", "full.parquet", "x.csv"), ".parquet or .jsonl"),
    (("convert", "note.txt", "x.parquet", "--from", "obd"), "lacks the column"),
    (("convert", "note.txt", "x.parquet", "--from", "vw", "--costs", "1"), "two numbers"),
    (("plot", "full.parquet", "x.gif", "ucb"), "unknown ending of the picture"),
    (("plot", "full.parquet", "x.png"), "at least one policy"),
    (("plot", "full.parquet", "x.png", "--kind", "coverage", "--queries", "1"), "queries=1"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_cost_one_sentence(folder, words, message):
    (folder / "note.txt").write_text("hello\n")
    before = sorted(folder.iterdir())
    result = run(folder, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
    assert "Traceback" not in result.output
    assert sorted(folder.iterdir()) == before


def test_warnings_are_one_line(folder):
    (folder / "torn.jsonl").write_bytes((folder / "logged.jsonl").read_bytes()[:-20])
    result = run(folder, "summarize", "torn.jsonl")
    assert result.exit_code == 0
    assert "warning: " in result.stderr
    assert "the last line is cut off" in result.stderr


def unsupported(batch):
    """Arm 0 has no chance in the first half and arm 1 none in the second, p = 1/2 all the same."""
    coin = np.random.default_rng(0).integers(0, 2, len(batch))
    batch.columns["arm"] = np.where(coin == 1, 2, batch.query < 100)
    batch.columns["propensity"] = np.full(len(batch), 0.5)


def not_the_loggers(batch):
    batch.columns["propensity"] = np.full(len(batch), 0.2)


def nothing_wrong(batch):
    pass


@pytest.mark.parametrize("spoil", [nothing_wrong, unsupported, not_the_loggers])
def test_summarize_answers_as_the_commands_do(tmp_path, spoil):
    batch = concatenated(SyntheticReader(SyntheticLog(queries=200, rounds=30)).batches(()))
    spoil(batch)
    convert(ColumnReader(SyntheticLog().header, batch), tmp_path / "log.parquet")
    found = answer(tmp_path, "summarize", "log.parquet")
    ways = {"full replay": "full", "rejection replay": "rejection", "estimation": "snips"}
    for question, method in ways.items():
        result = run(tmp_path, "evaluate", "log.parquet", "uniform", "--method", method)
        assert (question in found["can answer"]) == (result.exit_code == 0)
        if result.exit_code:
            assert found["cannot answer"][question] in result.output
    wrong = {"rejection replay", "estimation"} if spoil is not nothing_wrong else set()
    assert set(found["cannot answer"]) == wrong
