"""The command line on a tiny model saved to disk: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from metasd_bandits import Round, TraceHeader, read_trace
from metasd_bandits.plotting import style
from metasd_runtime import cli
from metasd_runtime.bench import demo
from metasd_runtime.metasd import MetaSD
from metasd_runtime.plot import _draw, plot_rounds

VOCAB = 26


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_llama, letters) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(seed=1, vocab=VOCAB, layers=4).save_pretrained(folder)
    letters(VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `metasd` as the shell would; returns (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["metasd", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


def generate(run, folder: Path, *more: object) -> tuple[int, str, str]:
    return run(
        "generate", "abcabcabc", "--target", folder, "--dtype", "float32",
        "--drafters", "prompt-lookup,suffix,early-exit:2,none", "--max-new-tokens", 24, *more,
    )  # fmt: skip


def test_json_is_one_object_that_agrees_with_plain_decoding(run, model_folder, letters):
    code, out, _ = generate(run, model_folder, "--json")
    result = json.loads(out)
    metasd = MetaSD.from_pretrained(model_folder, dtype="float32")
    ids = torch.tensor([letters(VOCAB)("abcabcabc").input_ids])
    plain = metasd.target.model.generate(ids, max_new_tokens=24, do_sample=False)
    assert code == 0
    assert result["tokens"] == plain[0, 9:].tolist()
    assert result["text"] == letters(VOCAB).decode(result["tokens"])
    assert sum(arm["pulls"] for arm in result["arms"]) == result["rounds"] == len(result["trace"])
    assert result["target_forwards"] == result["rounds"] + 1  # the prompt's
    assert result["seconds"] > 0
    assert result["finish"] == "length"


def test_streams_the_text_then_the_statistics(run, model_folder):
    _, out, _ = generate(run, model_folder)
    _, as_json, _ = generate(run, model_folder, "--json")
    text = json.loads(as_json)["text"]
    assert out.startswith(text)
    assert "merged" in out
    assert "early-exit:2" in generate(run, model_folder, "--policy", "ucb")[1]
    assert "24 tokens in" in out


def test_the_trace_file_holds_every_round(run, model_folder, tmp_path):
    path = tmp_path / "t.jsonl"
    _, out, _ = generate(run, model_folder, "--json", "--policy", "ucb", "--trace", path)
    result, trace = json.loads(out), read_trace(path)
    assert [r.emitted for r in trace] == [r["emitted"] for r in result["trace"]]
    assert trace.header.arms == ("prompt-lookup", "suffix", "early-exit:2", "none")
    generate(
        run, model_folder, "--json", "--policy", "ucb", "--trace", path
    )  # a second query is appended
    assert len(read_trace(path)) > len(trace)


def test_shadow_joint_lengths_and_draft_all(run, model_folder, tmp_path):
    path = tmp_path / "t.jsonl"
    plain = json.loads(generate(run, model_folder, "--json")[1])["tokens"]
    extra = ["--shadow", "--draft-length", "2,4", "--trace", path, "--policy", "hedge"]
    _, out, _ = generate(run, model_folder, "--json", *extra)
    assert json.loads(out)["tokens"] == plain
    trace = read_trace(path)
    assert "early-exit:2@4" in trace.header.arms
    assert all(r.rewards is not None and len(r.rewards) == len(trace.header.arms) for r in trace)
    _, out, _ = generate(run, model_folder, "--json", "--draft-all")
    assert json.loads(out)["tokens"] == plain


def test_train_router_is_a_command(run):
    code, out, _ = run("train-router", "--help")
    assert code == 0
    assert "--trace" in out


def test_sampling_follows_its_seed(run, model_folder):
    def tokens(seed: int) -> list[int]:
        _, out, _ = generate(run, model_folder, "--json", "--temperature", 1.5, "--seed", seed)
        return json.loads(out)["tokens"]

    # In bfloat16 a row's logits depend on the width of its block, which `auto` fits to measured
    # times; in float32 the seeded text is plain decoding's, whatever the blocks.
    def alone(seed: int, drafter: str = "early-exit:2") -> list[int]:
        _, out, _ = run(
            "generate", "abc", "--target", model_folder, "--dtype", "float32",
            "--drafters", drafter, "--reward", "bd", "--temperature", 1.5, "--seed", seed,
            "--max-new-tokens", 24, "--json",
        )  # fmt: skip
        return json.loads(out)["tokens"]

    assert alone(1) == alone(1) == alone(1, "none")
    assert alone(1) != alone(2)
    assert len(tokens(1)) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "ucbb"], "unknown policy 'ucbb'; did you mean 'ucb'?"),
        (["--policy", "ucb:beta=-1"], "beta=-1 is outside the allowed range"),
        (["--drafters", "prompt-lokup"], "did you mean 'prompt-lookup'?"),
        (["--first", "suffix"], "first=suffix says how a trained pool drafts; add --pool NAME"),
        (["--drafters", "early-exit:9"], "give an integer in [1, 3]"),
        (["--drafters", "none,none"], "names must differ"),
        (["--reward", "through"], "did you mean 'throughput'?"),
        (["--draft-length", "0"], "give an integer of at least 1"),
        (["--draft-length", "many"], "draft_length='many' is no whole number"),
        (["--draft-length", "2,2"], "several different ones"),
        (["--draft-threshold", "1.5"], "draft_threshold=1.5"),
        (["--draft-all", "--shadow"], "leave one of them out"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 is out of range"),
        (["--max-new-tokens", "-3"], "max_new_tokens=-3 is out of range"),
        (["--temperature", "-1"], "temperature=-1.0 is negative"),
        (["--trace", "/nowhere/to/be/found/t.jsonl"], "/nowhere/to/be/found/t.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(run, model_folder, arguments, message):
    code, out, err = generate(run, model_folder, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out.strip() == ""


def test_an_empty_prompt_is_refused(run, model_folder):
    code, _, err = run("generate", "", "--target", model_folder)
    assert code == 2
    assert "the prompt is empty" in err


def test_ctrl_c_keeps_what_was_made(run, model_folder, tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    original, calls = MetaSD.generate, []

    def interrupted(self, *args, **kwargs):
        def on_round(round_):
            calls.append(round_)
            if len(calls) == 3:
                raise KeyboardInterrupt

        return original(self, *args, on_round=on_round, **kwargs)

    monkeypatch.setattr(MetaSD, "generate", interrupted)
    code, out, _ = generate(run, model_folder, "--json", "--trace", path)
    result = json.loads(out)
    assert code == 130
    assert result["finish"] == "interrupted"
    assert result["tokens"]
    assert len(read_trace(path)) == len(result["trace"])


def test_demo_leaves_a_trace_and_a_picture(model_folder, tmp_path, monkeypatch, capsys):
    load = MetaSD.from_pretrained
    monkeypatch.setattr(
        MetaSD,
        "from_pretrained",
        lambda **options: load(
            model_folder, **{**options, "drafters": ["prompt-lookup", "early-exit:2", "none"]}
        ),
    )
    # The tiny tokenizer knows letters only.
    monkeypatch.setattr(
        demo, "chat_tokens", lambda tokenizer, text: tokenizer("".join(text.split())[:40]).input_ids
    )
    demo.run(tmp_path, 12, "float32", None)
    out = capsys.readouterr().out
    assert out.count("texts agree: yes") == 5
    trace = read_trace(tmp_path / "trace.jsonl")
    assert {r.query for r in trace} == {"code", "translation", "summarization", "qa", "math"}
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_leaves_no_file(tmp_path, model_folder):
    metasd = MetaSD.from_pretrained(model_folder, drafters=["none"])
    output = metasd.generate([0, 1, 2], max_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="nosuch"):
        plot_rounds(output.trace.header, output.trace.rounds, tmp_path / "rounds.nosuch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [4, 20, 37])
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_the_legend_stays_inside_the_picture(n, length):
    """Whatever the drafters are called: those of a pool behind another have long names."""
    header = TraceHeader(tuple(f"{i:*>{length}}" for i in range(n)), 5, "ucb", "throughput")
    with style():
        figure = _draw(header, [Round("q", 0, n - 1, 5, 2, 3, 0.4, 0.5, 0.5, 1 / n)])
        figure.draw_without_rendering()
    names = figure.legends[0].get_window_extent()
    assert len(figure.legends) == 1
    assert len(figure.legends[0].get_texts()) == n
    assert names.x0 >= 0
    assert names.x1 <= figure.bbox.width
    assert figure.axes[0].get_window_extent().height > 50


def test_help_names_every_command():
    out = CliRunner().invoke(cli.app, ["--help"]).output
    assert all(name in out for name in ("generate", "demo", "models"))
