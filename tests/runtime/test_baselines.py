"""Baselines under the same roof: learned router, uniform choice, best fixed drafter."""

from __future__ import annotations

import json
import math
import random

import joblib
import pytest
import torch
import typer
from tiny_models import ATTENTION, build
from transformers import BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from metasd_bandits import Round, Trace, TraceHeader, TraceWriter
from metasd_bandits.checks import ConfigError
from metasd_runtime.bench.oracle import best_fixed
from metasd_runtime.decoding.drafter import Draft, Drafter
from metasd_runtime.decoding.learned_router import LearnedRouter, best_arms, train_router
from metasd_runtime.metasd import MetaSD
from metasd_runtime.training.router_cli import train_router_command

PROMPT = torch.tensor([[5, 9, 3, 5, 9, 3, 7, 5, 9, 3, 5, 9]])
NEW = {"max_new_tokens": 20, "return_dict_in_generate": True}
CODE = ["def {}(x): return x", "class {}: pass", "for {} in range(9): print(1)", "import {}"]
PROSE = ["the {} slept on the mat", "once a {} met a dog", "my {} is very old", "tell of a {}"]


@pytest.fixture(scope="module")
def model():
    return build(*ATTENTION["granite"])


def examples(n: int, seed: int = 0):
    """Prompts of two kinds, with made-up words in them, and the drafter for each."""
    rng = random.Random(seed)
    word = lambda: "".join(rng.choices("aeioubdgklmnrst", k=6))  # noqa: E731
    pairs = [(t.format(word()), d) for t, d in rng.choices(
        [(t, "suffix") for t in CODE] + [(t, "prompt-lookup") for t in PROSE], k=n
    )]  # fmt: skip
    return [p for p, _ in pairs], [d for _, d in pairs]


def test_the_router_learns_what_a_task_looks_like():
    router = train_router(*examples(60))
    prompts, drafters = examples(60, seed=1)
    assert (router.predict(prompts) == drafters).mean() == 1.0


def test_the_router_uses_one_drafter_from_the_prompt(model, letters):
    tokenizer = letters(48)
    pool = ["prompt-lookup", "suffix", "early-exit:2"]
    seen = []

    def classify(text):
        seen.append(text)
        return "suffix" if text.startswith("f") else "early-exit:2"

    policy = LearnedRouter(classify, tokenizer)
    metasd = MetaSD(model, tokenizer, drafters=pool, policy=policy, reward="bd")
    out = metasd.generate(PROMPT, **NEW)
    assert seen == [tokenizer.decode(PROMPT[0])]
    assert {r.arm for r in out.trace} == {1}
    assert all(r.propensity == 1.0 for r in out.trace)
    out = metasd.generate(PROMPT + 1, **NEW)
    assert {r.arm for r in out.trace} == {2}
    plain = model.generate(PROMPT + 1, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert out.sequences.tolist() == plain.tolist()


def test_where_the_named_drafter_breaks_another_serves(model, letters):
    class Broken(Drafter):
        name = "broken"

        def propose(self, tokens, n, sampling) -> Draft:
            raise RuntimeError("out of order")

    policy = LearnedRouter(lambda text: "broken", letters(48))
    metasd = MetaSD(model, drafters=["prompt-lookup", Broken()], policy=policy, reward="bd")
    with pytest.warns(RuntimeWarning, match="out of order"):
        out = metasd.generate(PROMPT, **NEW)
    assert {r.arm for r in out.trace} == {0}


def test_a_drafter_nobody_knows_is_refused(model, letters):
    policy = LearnedRouter(lambda text: "sufix", letters(48))
    metasd = MetaSD(model, drafters=["prompt-lookup", "suffix"], policy=policy, reward="bd")
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        metasd.generate(PROMPT, **NEW)
    with pytest.raises(ConfigError, match="does not exist"):
        LearnedRouter("nowhere.joblib", letters(48))
    with pytest.raises(ConfigError, match="classifies no text"):
        LearnedRouter(3, letters(48))
    with pytest.raises(ConfigError, match="tokenizer"):
        metasd.generate(PROMPT, policy="learned-router:r.joblib", **NEW)


def test_any_sequence_classifier_routes(model, letters, tmp_path):
    tokenizer = letters(48)
    tokenizer.add_special_tokens({"pad_token": "a"})
    labels = {0: "prompt-lookup", 1: "suffix"}
    config = BertConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
    )
    torch.manual_seed(0)
    bert = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        bert.classifier.bias.copy_(torch.tensor([-9.0, 9.0]))
    bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    metasd = MetaSD(
        model,
        tokenizer,
        drafters=["prompt-lookup", "suffix"],
        policy=f"learned-router:{tmp_path}",
        reward="bd",
    )
    assert {r.arm for r in metasd.generate(PROMPT, **NEW).trace} == {1}


def one(query, arm, reward, rewards=None):
    return Round(query, 0, arm, 5, 1, 2, 0.2, 0.2, reward, rewards=rewards)


def test_best_arms_of_traces():
    header = TraceHeader(("a", "b", "c"), 5, "uniform", "bd")
    trace = Trace(
        header,
        [
            one("full", 0, 0.1, (0.1, 0.4, math.nan)),
            one("full", 0, 0.5, (0.5, 0.4, math.nan)),
            one("full", 0, 0.1, (0.1, 0.4, math.nan)),
            one("mixed", 0, 0.3),
            one("mixed", 2, 0.2),
            one("mixed", 2, 0.6),
            one("only", 1, 0.9),
        ],
    )
    assert best_arms([trace]) == {"full": "b", "mixed": "c"}


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(train_router_command)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_train_router(command, model, letters, tmp_path):
    prompts, drafters = examples(40)
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p, "drafter": d} for p, d in zip(prompts, drafters, strict=True)]
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    result = command(data, "-o", tmp_path / "r.joblib", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["prompts"] == 40
    assert report["accuracy"] == 1.0
    assert 0.5 <= report["commonest"] < 0.8
    assert list(joblib.load(tmp_path / "r.joblib").predict(prompts)) == drafters
    assert "held-out" in command(data, "-o", tmp_path / "r.joblib").output
    metasd = MetaSD(model, letters(48), drafters=["suffix", "prompt-lookup"], reward="bd")
    out = metasd.generate(PROMPT, policy=f"learned-router:{tmp_path / 'r.joblib'}", **NEW)
    assert len({r.arm for r in out.trace}) == 1


def test_train_router_from_a_trace(command, tmp_path):
    prompts, drafters = examples(30)
    header = TraceHeader(("prompt-lookup", "suffix"), 5, "uniform", "bd")
    with TraceWriter(tmp_path / "t.jsonl", header) as writer:
        for i, drafter in enumerate(drafters):
            best = header.arms.index(drafter)
            rewards = tuple(0.6 if arm == best else 0.2 for arm in range(2))
            writer.write(one(f"q{i}", 0, rewards[0], rewards))
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "\n".join(json.dumps({"prompt": p, "query": f"q{i}"}) for i, p in enumerate(prompts))
    )
    result = command(data, "--trace", tmp_path / "t.jsonl", "-o", tmp_path / "r.joblib", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["prompts"] == 30
    assert list(joblib.load(tmp_path / "r.joblib").predict(prompts)) == drafters


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("not json", "no JSON object"),
        ('{"prompt": "a"}', 'names no "drafter"'),
        ('{"prompt": "a", "drafter": "suffix"}', "at least two drafters"),
        ("", "at least two drafters"),
    ],
)
def test_train_router_says_what_is_wrong(command, tmp_path, lines, message):
    data = tmp_path / "prompts.jsonl"
    data.write_text(lines)
    result = command(data, "-o", tmp_path / "r.joblib")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.glob("*.joblib*"))


def test_best_fixed_is_the_arm_of_fewest_rounds(model):
    pool = ["prompt-lookup", "early-exit:1", "early-exit:2"]
    metasd = MetaSD(model, drafters=pool, reward="bd", scope="carried")
    prompts = [PROMPT, PROMPT + 1]
    oracle = best_fixed(metasd, prompts, max_new_tokens=30)
    rounds = {
        arm: [
            metasd.generate(
                ids, policy=f"fixed:arm={i}", max_new_tokens=30, return_dict_in_generate=True
            ).statistics.rounds
            for ids in prompts
        ]
        for i, arm in enumerate(pool)
    }
    assert {arm: [s.rounds for s in each] for arm, each in oracle.statistics.items()} == rounds
    assert sum(rounds[oracle.arm]) == min(map(sum, rounds.values()))
    for i, arm in enumerate(oracle.per_prompt):
        assert rounds[arm][i] == min(each[i] for each in rounds.values())
    with pytest.raises(ConfigError, match="at least one prompt"):
        best_fixed(metasd, [])


def test_uniform_choice_pulls_every_drafter(model):
    metasd = MetaSD(model, drafters=["prompt-lookup", "suffix"], policy="uniform", reward="bd")
    out = metasd.generate(PROMPT, max_new_tokens=40, seed=0, return_dict_in_generate=True)
    assert all(arm.pulls > 3 for arm in out.statistics.arms[:2])
    assert {r.propensity for r in out.trace} == {0.5}


def test_the_router_keeps_the_policy_contract(letters):
    policy = LearnedRouter(lambda text: "b", letters(4))
    policy.reset(3, seed=0)
    policy.read([0, 1], ["a", "b", "c"])
    assert policy.select() == 1
    assert policy.select([True, False, True]) == 0
    assert policy.probabilities().tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="no arm"):
        policy.select([False] * 3)
    with pytest.raises(ValueError, match="outside"):
        policy.update(1, math.nan)


def test_the_router_reads_every_row_of_a_batch(model, letters):
    policy = LearnedRouter(lambda t: "suffix" if t[0] == "f" else "prompt-lookup", letters(48))
    metasd = MetaSD(model, drafters=["prompt-lookup", "suffix"], policy=policy, reward="bd")
    out = metasd.generate(torch.cat([PROMPT, PROMPT + 1]), **NEW)
    arms = {name: {r.arm for r in out.trace if r.query.endswith(name)} for name in (".0", ".1")}
    assert arms == {".0": {1}, ".1": {0}}
    with pytest.raises(ConfigError, match="heterogeneous"):
        metasd.generate_many([PROMPT[0].tolist()], mode="homogeneous", max_new_tokens=4)
