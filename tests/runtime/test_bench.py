"""`metasd bench`: what a suite refuses, what a run records, and that a killed one goes on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import joblib
import numpy as np
import pytest
import scipy.stats
from bench_suites import SUITE, measure, write_suite
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Script

from metasd_bandits import ConfigError, read_trace
from metasd_runtime import cli
from metasd_runtime.bench import methods
from metasd_runtime.bench.results import Results, read_results, speed_ratio
from metasd_runtime.bench.suite import find_suite, read_suite, shipped_suites
from metasd_runtime.bench.tasks import load_items
from metasd_runtime.decoding.learned_router import train_router
from metasd_runtime.drafters.pool import MANIFEST
from metasd_runtime.model.load import load_target

VOCAB = 26


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_llama, letters) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(seed=1, vocab=VOCAB, layers=4).save_pretrained(folder)
    letters(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory, model) -> Results:
    folder = tmp_path_factory.mktemp("bench")
    measure(model, write_suite(folder), folder / "out")
    return read_results(folder / "out")


@pytest.mark.parametrize("name", shipped_suites())
def test_shipped_suites_are_sound_and_described(name):
    path = find_suite(name)
    suite = read_suite(path)
    assert suite.name == name
    assert suite.title
    assert path.read_text(encoding="utf-8").startswith("# ")
    if name not in ("quick", "own-prompts"):  # the product has no data of others
        with pytest.raises(ConfigError, match=r"--data.*https://"):
            load_items(suite, [path.parent])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_suites())
def test_everybody_in_a_shipped_suite_can_be_made(name, smollm, tmp_path):
    router = train_router(["write a program", "add up"], ["eagle-code", "eagle-math"])
    joblib.dump(router, tmp_path / "router.joblib")
    suite = read_suite(find_suite(name))
    everybody = methods.contenders(suite, smollm, [tmp_path])
    assert len({c.slug for c in everybody}) == len(everybody)
    settings = len(suite.batches) * len(suite.temperatures) * len(suite.seeds)
    assert sum(c.kind == "plain" for c in everybody) == settings


def test_a_method_takes_part_where_the_pool_it_needs_is_beside_the_data(
    model, tmp_path, monkeypatch, capsys
):
    extra = (
        '{ name = "heads", each = true, drafters = ["pool:heads?tree=static"], needs = "heads" }'
    )
    path = write_suite(
        tmp_path, SUITE.replace('  { name = "each"', f'  {extra},\n  {{ name = "each"')
    )
    suite, loaded, asked = read_suite(path), load_target(str(model)), []

    def make_pool(names, target):
        asked.extend(names)
        return [Script("one", lambda tokens, n: []), Script("other", lambda tokens, n: [])]

    monkeypatch.setattr(methods, "make_pool", make_pool)
    without = [c.method for c in methods.contenders(suite, loaded, [tmp_path])]
    assert asked == []
    assert (
        "heads left out: it needs the trained pool heads beside the data" in capsys.readouterr().err
    )
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / MANIFEST).write_text("{}")
    everybody = [c.method for c in methods.contenders(suite, loaded, [tmp_path / "no", tmp_path])]
    assert asked == [f"pool:{tmp_path / 'heads'}?tree=static"]
    assert set(everybody) - set(without) == {"one", "other"}


def test_quick_needs_no_data():
    items = load_items(read_suite(find_suite("quick")))
    assert len({item.task for item in items}) == len(items) == 5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('policy = "uniform"', 'policy = "unifrom"', "did you mean 'uniform'"),
        ('policy = "ucb:carry=0.5"', 'policy = "ucb:beta=-1"', "beta=-1"),
        ('reward = "be"', 'reward = "bee"', "'bee'"),
        ("draft_all = true", "draft_al = true", "did you mean 'draft_all'"),
        ("prompt_lookup_num_tokens", "prompt_lookup_tokens", "'prompt_lookup_num_tokens'"),
        ('"suffix"', '"sufix"', "did you mean 'suffix'"),
        ("max_new_tokens = 12", "max_new_tokens = 0", "max_new_tokens=0"),
        ("max_new_tokens = 12", "max_new_token = 12", "did you mean 'max_new_tokens'"),
        ("warm_up = 2", "temperatures = [-1.0]", r"temperatures=-1\.0"),
        ("warm_up = 2", "seeds = [1, 1]", "seeds names 1 twice"),
        ("warm_up = 2", "batches = []", "batches is empty"),
        ("warm_up = 2", "draft_lengths = [0]", "draft_lengths=0"),
        ("warm_up = 2", 'shuffle = "yes"', "shuffle='yes' is not true or false"),
        ('dtype = "float32"', 'dtype = "float31"', "did you mean 'float32'"),
        ('name = "two"', 'name = "one"', "tasks names 'one' twice"),
        ('name = "Rand"', 'name = "plain"', "methods names 'plain' twice"),
        ('{ name = "Rand", ', "{ ", "has no name"),
        ('"prompts.jsonl#a" }', '"prompts.jsonl#a", gather = 0 }', "gather of task 'one'=0"),
        ('"prompts.jsonl#a" }', '"prompts.jsonl#a", templates = ["{1}"] }', r"has no \{0\}"),
        ('title = "Tiny"', "title = Tiny", "not TOML"),
    ],
)
def test_a_suite_that_cannot_work_is_refused_when_it_is_read(tmp_path, old, new, message):
    assert old in SUITE
    path = write_suite(tmp_path, SUITE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as refused:
        read_suite(path)
    assert str(refused.value).startswith(str(path))


def test_sources_that_are_not_there_are_named(tmp_path):
    path = write_suite(tmp_path, SUITE.replace("jsonl#b", "jsonl#c"))
    with pytest.raises(ConfigError, match=r"category of prompts.jsonl 'c'.*Known: a, b"):
        load_items(read_suite(path), [tmp_path])
    with pytest.raises(ConfigError, match=r"nowhere.*--data"):
        load_items(read_suite(path), [tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="did you mean 'table-10'"):
        find_suite("table10")


def test_prompts_are_cut_gathered_joined_and_worded(tmp_path):
    text = SUITE.replace(
        '{ name = "one", prompts = "prompts.jsonl#a" }',
        '{ name = "one", prompts = ["prompts.jsonl#a", "prompts.jsonl#b"], cut = "abc", '
        'templates = ["<{0}|{1}>", "{1}{0}"] }',
    ).replace('"prompts.jsonl#b" },\n]', '"prompts.jsonl#b", gather = 2 },\n]')
    items = load_items(read_suite(write_suite(tmp_path, text)), [tmp_path])
    assert [item[:3] for item in items] == [
        ("one", "one/0", "<abcab|xyzzyxyz>"),
        ("two", "two/0", "xyzzyxyz hellohello"),
        ("one", "one/1", "hellohelloaabbaabb"),
        ("one", "one/2", "<qrsqrsqr|mnmnmnmn>"),
    ]


def test_a_shuffled_stream_holds_the_same_prompts(tmp_path):
    in_turn = load_items(read_suite(write_suite(tmp_path)), [tmp_path])
    assert [item.task for item in in_turn] == ["one", "two"] * 3
    shuffled = write_suite(tmp_path, "shuffle = true\n" + SUITE)
    mixed = load_items(read_suite(shuffled), [tmp_path])
    assert mixed == load_items(read_suite(shuffled), [tmp_path])
    assert sorted(mixed) == sorted(in_turn)
    assert mixed != in_turn


def test_everybody_answers_every_prompt_as_plain_decoding_does(measured):
    names = ["plain", "generate", "lookup", "assisted", "prompt-lookup", "suffix"]
    names += ["early-exit:2", "Rand", "UCB, carried", "DraftAll"]
    assert measured.finished
    answers = {}
    for line in measured.lines:
        answers.setdefault(line["prompt"], []).append(line)
    assert list(answers) == ["one/0", "two/0", "one/1", "two/1", "one/2", "two/2"]
    for lines in answers.values():
        assert [line["method"] for line in lines] == names  # in turn, prompt by prompt
        assert all(line["output"] == lines[0]["output"] for line in lines)
        assert all(line["tokens"] == len(line["output"][0]) == 12 for line in lines)
        assert all(line["difference"] is None for line in lines)
        assert all(line["seconds"] > 0 for line in lines)
    assert not measured.unequal()


def test_traces_hold_the_rounds_that_the_lines_count(measured):
    assert len(measured.traces) == 6  # all of ours but plain decoding
    for slug, trace in measured.traces.items():
        lines = [line for line in measured.lines if line["slug"] == slug]
        for line in lines:
            rounds = [r for r in trace if r.query == line["prompt"]]
            assert len(rounds) == line["rounds"]
            assert sum(r.emitted for r in rounds) == line["tokens"]
            assert sum(r.verify_seconds for r in rounds) == pytest.approx(line["verify_seconds"])
        assert trace.header.meta["method"] == lines[0]["method"]


def test_a_difference_from_plain_decoding_is_a_fault_in_float32(measured):
    wrong = [{**measured.lines[4], "difference": 2, "gap": 1.0}]
    assert Results(measured.folder, measured.header, wrong).unequal() == wrong
    half = {**measured.header, "dtype": "bfloat16"}
    assert not Results(measured.folder, half, wrong).unequal()


def _timeless(folder: Path) -> tuple[list, dict]:
    """Lines and traces without whatever the clock writes."""
    lines = [
        {k: v for k, v in json.loads(line).items() if not k.endswith("seconds")}
        for line in (folder / "results.jsonl").read_text().splitlines()
    ]
    traces = {
        path.name: [
            (r.query, r.index, r.arm, r.drafted, r.accepted, r.emitted, r.propensity)
            for r in read_trace(path)
        ]
        for path in (folder / "traces").iterdir()
    }
    return lines, traces


@pytest.mark.parametrize("stop_at", [1, 26, 53])
@pytest.mark.filterwarnings("ignore:.*cut off")
def test_a_killed_run_goes_on_to_the_same_results(tmp_path, model, measured, stop_at):
    path = write_suite(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measure(model, path, tmp_path / "out", stop_at)
    results = tmp_path / "out" / "results.jsonl"
    assert len(results.read_text().splitlines()) == 1 + stop_at
    _cut_as_a_crash_would(tmp_path / "out")
    measure(model, path, tmp_path / "out")
    mine, theirs = _timeless(tmp_path / "out"), _timeless(measured.folder)
    assert mine[0][1:] == theirs[0][1:]
    assert mine[1] == theirs[1]


def _cut_as_a_crash_would(folder: Path) -> None:
    """The last answer's line is cut in the middle; its rounds, written before it, stand."""
    results = folder / "results.jsonl"
    text = results.read_text()
    if text.count("\n") > 1:
        results.write_text(text[:-20])


def test_a_finished_run_decodes_nothing_again(model, tmp_path, measured):
    before = (measured.folder / "results.jsonl").read_bytes()
    measure(model, measured.folder.parent / "tiny.toml", measured.folder, stop_at=0)
    assert (measured.folder / "results.jsonl").read_bytes() == before


def test_results_of_another_suite_are_not_continued(tmp_path, model):
    measure_some = write_suite(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measure(model, measure_some, tmp_path / "out", 2)
    other = write_suite(tmp_path, SUITE.replace("max_new_tokens = 12", "max_new_tokens = 11"))
    with pytest.raises(ConfigError, match=r"results of another suite.*--output"):
        measure(model, other, tmp_path / "out")


def test_dimensions_are_measured_side_by_side(tmp_path, model):
    text = """
    drafters = ["prompt-lookup", "suffix"]
    dtype = "float32"
    prompts_per_task = 3
    max_new_tokens = 6
    temperatures = [0.0, 1.0]
    seeds = [0, 1]
    batches = [1, 2]
    draft_lengths = [2, 3]
    task = [{ name = "one", prompts = "prompts.jsonl#a" }]
    method = [
      { name = "generate", engine = "transformers" },
      { name = "rows", policy = "uniform", reward = "be", mode = "heterogeneous" },
    ]
    """
    measure(model, write_suite(tmp_path, text), tmp_path / "out")
    results = read_results(tmp_path / "out")
    assert [view.name for view in results.views()] == [
        f"temperature {t}, batch {b}, N = {n}" for t in (0, 1) for b in (1, 2) for n in (2, 3)
    ]
    for view in results.views():
        assert {line["seed"] for line in view.lines} == {0, 1}
        prompts = ["one/0", "one/1", "one/2"] if view.batch == 1 else ["one/0+1", "one/2+0"]
        for method in ("plain", "generate", "rows"):
            assert [x["prompt"] for x in view.of(method) if x["seed"] == 0] == prompts
            assert sum(x["tokens"] for x in view.of(method)) == 2 * 3 * 6
        if view.temperature == 0:
            for method in ("generate", "rows"):
                outputs = [x["output"] for x in view.of(method)]
                assert outputs == [x["output"] for x in view.of("plain")]
    sampled = [x["output"] for x in results.lines if x["temperature"] == 1 and x["batch"] == 1]
    assert len({json.dumps(output) for output in sampled}) > 6


def test_a_learned_router_is_found_beside_the_data(tmp_path, model):
    router = train_router(["abab", "baba", "xyxy", "yxyx"], ["suffix"] * 2 + ["prompt-lookup"] * 2)
    joblib.dump(router, tmp_path / "r.joblib")
    uniform = 'policy = "uniform", reward = "bd", draft_length = [2, 4]'
    text = SUITE.replace(uniform, 'policy = "learned-router:r.joblib"')
    with pytest.raises(KeyboardInterrupt):
        measure(model, write_suite(tmp_path, text), tmp_path / "out", stop_at=10)
    chosen = read_results(tmp_path / "out").traces["Rand-T0-s0-b1-N5"]
    assert len({r.arm for r in chosen}) == 1
    assert chosen.header.arms[chosen.rounds[0].arm] == router.predict(["abcabcab"])[0]


def test_a_target_is_compiled_once_for_everybody(tmp_path, model, monkeypatch):
    asked = []

    def compile_forward(target, blocks, features, say):
        asked.append((blocks, features))
        serves = lambda *block: asked.append(block[1:])  # noqa: E731  (and is not this one)
        return SimpleNamespace(serves=serves, gives=lambda *block: False)

    monkeypatch.setattr(methods, "compile_forward", compile_forward)
    path = write_suite(tmp_path, "compiled = true\ndraft_lengths = [3, 5]\n" + SUITE)
    with pytest.raises(KeyboardInterrupt):
        measure(model, path, tmp_path / "out", stop_at=3)
    assert asked[0] == ([1, 3, 4, 5, 6], ())  # joint arms of two and four among them
    served = {n for n, _ in asked[1:]}
    assert 1 in served
    assert served <= {1, 2, 3, 4, 5, 6}
    results = read_results(tmp_path / "out")
    differs = [{**results.lines[0], "difference": 1}]
    assert not Results(results.folder, results.header, differs).unequal()  # it may be a tie


def run_command(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["metasd", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_the_command_runs_a_suite_of_the_users(tmp_path, model, monkeypatch, capsys):
    path = write_suite(tmp_path)
    options = ("--target", model, "--prompts-per-task", 1, "--max-new-tokens", 4)
    assert run_command(monkeypatch, "bench", path, *options, "--output", tmp_path / "out") == 0
    assert "Speed-up over plain decoding" in capsys.readouterr().out
    written = {entry.name for entry in (tmp_path / "out").iterdir()}
    files = {"results.jsonl", "results.parquet", "tables.md", "report.html"}
    assert written == files | {"pictures", "traces"}
    assert read_results(tmp_path / "out").finished


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("bench",), 2, "name one suite"),
        (("bench", "quick", "--quick"), 2, "name one suite"),
        (("bench", "quikc"), 2, "did you mean 'quick'"),
        (("bench", "table-4", "--data", "nowhere"), 2, "github.com/hemingkx/Spec-Bench"),
        (("bench", "--quick", "--dtype", "int8"), 2, "dtype"),
        (("bench", "--list"), 0, "mixed-stream"),
    ],
)
def test_the_command_refuses_in_a_sentence(monkeypatch, capsys, arguments, status, says):
    assert run_command(monkeypatch, *arguments) == status
    captured = capsys.readouterr()
    assert says in captured.out + captured.err


def lines_of(method: str, task: str, counts: list[int], seconds: list[float]) -> list[dict]:
    return [
        {"method": method, "task": task, "prompt": f"{task}/{i}", "tokens": n, "seconds": s}
        for i, (n, s) in enumerate(zip(counts, seconds, strict=True))
    ]


answers = st.lists(st.tuples(st.integers(1, 200), st.floats(0.01, 50.0)), min_size=1, max_size=14)


@settings(max_examples=40, deadline=None)
@given(answers, answers, st.integers(0, 3))
def test_a_ratio_of_speeds_is_the_mean_over_tasks_of_totals(first, second, extra):
    tasks = {"a": first, "b": second}
    mine, base, expected = [], [], []
    for task, some in tasks.items():
        counts, seconds = zip(*some, strict=True)
        theirs = [s * (1.5 + i) for i, s in enumerate(seconds)]
        mine += lines_of("m", task, counts, seconds)
        base += lines_of("p", task, counts, theirs)
        expected.append(math.fsum(theirs) / math.fsum(seconds))
    unanswered = lines_of("m", "a", [7] * (len(first) + extra), [1e6] * (len(first) + extra))
    ratio = speed_ratio(mine + unanswered[len(first) :], base)
    assert ratio.value == pytest.approx(sum(expected) / 2)
    if min(len(first), len(second)) < 4:
        assert math.isnan(ratio.low)
        assert math.isnan(ratio.high)
        assert str(ratio) == f"{ratio.value:.2f}"


def test_two_to_nine_prompts_have_the_textbook_interval_of_a_ratio():
    own, theirs = np.random.default_rng(1).gamma(8.0, 0.25, (2, 5))
    ratio = speed_ratio(
        lines_of("m", "a", [50] * 5, own.tolist()), lines_of("p", "a", [50] * 5, theirs.tolist())
    )
    left_out = (theirs.sum() - theirs) / (own.sum() - own)
    half = scipy.stats.t.ppf(0.975, 4) * np.sqrt(4 * left_out.var())
    assert (ratio.value - ratio.low, ratio.high - ratio.value) == pytest.approx((half, half))


def test_one_prompt_has_no_interval():
    ratio = speed_ratio(lines_of("m", "a", [50], [1.0]), lines_of("p", "a", [50], [2.0]))
    assert str(ratio) == "2.00"


@pytest.mark.parametrize("prompts", [3, 5, 9])
def test_intervals_of_few_prompts_cover_the_true_ratio(prompts):
    """400 runs; hits are binomial(400, about 0.95)."""
    rng = np.random.default_rng(prompts)
    covered = 0
    for _ in range(400):
        own = rng.gamma(8.0, 0.25, prompts)
        theirs = own * rng.gamma(30.0, 0.05, prompts)  # 1.5 times as long on average
        counts = [50] * prompts
        ratio = speed_ratio(
            lines_of("m", "a", counts, own.tolist()), lines_of("p", "a", counts, theirs.tolist())
        )
        covered += ratio.low <= 1.5 <= ratio.high
    least, most = scipy.stats.binom.interval(0.999, 400, 0.95)
    assert least <= covered <= most


@pytest.mark.parametrize("n_tasks", [1, 5])
def test_intervals_cover_the_true_ratio_as_often_as_they_say(n_tasks):
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        own = rng.gamma(8.0, 0.25, 20)
        theirs = own * rng.gamma(30.0, 0.05, 20)  # 1.5 times as long on average
        mine, base = [], []
        for t in range(n_tasks):
            some = slice(t, None, n_tasks)
            counts = [50] * len(own[some])
            mine += lines_of("m", f"task {t}", counts, own[some].tolist())
            base += lines_of("p", f"task {t}", counts, theirs[some].tolist())
        ratio = speed_ratio(mine, base)
        covered += ratio.low <= 1.5 <= ratio.high
    assert 180 <= covered <= 200  # 190 expected


def test_the_best_single_is_each_tasks_fastest(measured):
    [view] = measured.views()
    for task in view.tasks:
        speed = {}
        for name in view.methods("single"):
            some = [x for x in measured.lines if (x["method"], x["task"]) == (name, task)]
            speed[name] = sum(x["tokens"] for x in some) / sum(x["seconds"] for x in some)
        assert view.best_single(task) == max(speed, key=lambda name: speed[name])


def test_the_suite_in_the_documentation_reads(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "bench.md"
    [block] = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    suite = read_suite(write_suite(tmp_path, block))
    assert len(suite.methods) == 8


def test_the_documentation_lists_the_shipped_suites():
    page = Path(__file__).parents[2] / "docs" / "bench.md"
    rows = re.findall(r"^\| `([a-z0-9-]+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(shipped_suites())
