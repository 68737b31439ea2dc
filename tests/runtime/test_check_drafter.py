"""Drafters of other people: checked, registered, named on the command line."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from metasd_bandits import ConfigError, plugins
from metasd_bandits.testing import ContractError
from metasd_runtime import (
    Draft,
    Drafter,
    Fallback,
    PromptLookup,
    Target,
    check_drafter,
    register_drafter,
)
from metasd_runtime.cli import app
from metasd_runtime.drafters import registry
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.registry import make_drafter


@pytest.fixture(scope="module")
def target(tiny_llama):
    return Target(tiny_llama(3, vocab=12, layers=3, sharpness=20.0))


@pytest.mark.parametrize(
    "name",
    ["prompt-lookup", "suffix", "lookahead", "early-exit:1", "prompt-lookup>early-exit:1"],
)
def test_built_in_drafters_pass(target, name):
    check_drafter(make_drafter(name, target), target)


def test_a_language_model_passes(target, tiny_llama):
    drafter = LanguageModel(tiny_llama(5, vocab=12), 12, "lm")
    check_drafter(drafter, target)
    check_drafter(Fallback(PromptLookup(), drafter), target)


class Last(Drafter):
    name = "last"

    def propose(self, tokens, n, sampling):
        return Draft([tokens[-1]] * n)


class TooLong(Last):
    def propose(self, tokens, n, sampling):
        return Draft([tokens[-1]] * (n + 1))


class OutsideTheVocabulary(Last):
    def propose(self, tokens, n, sampling):
        return Draft([10**6])


class NoDraftAtAll(Last):
    def propose(self, tokens, n, sampling):
        return [tokens[-1]]


class DrawsFromTheGlobalGenerator(Last):
    def propose(self, tokens, n, sampling):
        return Draft(torch.randint(12, (n,)).tolist())


class WritesIntoTheText(Last):
    def propose(self, tokens, n, sampling):
        tokens.append(1)
        tokens.pop(0)
        return Draft([1])


class LeavesOutWhatItDrew(Last):
    def propose(self, tokens, n, sampling):
        token, probs = sampling.propose(torch.zeros(12), tokens)
        return Draft([token], probs[None]) if token > 5 else Draft()


class HidesItsProbs(Last):
    def propose(self, tokens, n, sampling):
        return Draft([sampling.propose(torch.zeros(12), tokens)[0]])


class Raises(Last):
    def propose(self, tokens, n, sampling):
        raise KeyError("cache")


def test_a_sound_drafter_passes(target):
    check_drafter(Last(), target)


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (TooLong(), "tokens were drafted where"),
        (OutsideTheVocabulary(), "outside the target's vocabulary"),
        (NoDraftAtAll(), r"return Draft\(tokens\)"),
        (DrawsFromTheGlobalGenerator(), "draw through sampling.propose alone"),
        (WritesIntoTheText(), "copy it first"),
        (LeavesOutWhatItDrew(), "leave nothing out"),
        (HidesItsProbs(), r"give Draft\(tokens, probs\)"),
        (Raises(), "raised KeyError"),
        ("prompt-lookup", "derive its class from metasd_runtime.Drafter"),
    ],
)
def test_broken_drafters_are_told_what_to_fix(target, drafter, says):
    with pytest.raises(ContractError, match=says):
        check_drafter(drafter, target)


def test_a_registered_drafter_is_made_by_name(target, monkeypatch):
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    register_drafter("mine", lambda target, text: PromptLookup(int(text)))
    assert make_drafter("mine:4", target).name == PromptLookup(4).name
    with pytest.raises(ConfigError, match="use letters and hyphens"):
        register_drafter("a>b", lambda target, text: Last())
    with pytest.raises(ConfigError, match="give a function make"):
        register_drafter("mine", Last())


def test_an_entry_point_is_found_by_name(target, monkeypatch):
    point = EntryPoint("theirs", f"{__name__}:make_last", "metasd.drafters")
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    plugins.load_plugins.cache_clear()
    assert make_drafter("theirs", target).name == "last"
    plugins.load_plugins.cache_clear()


def make_last(target, text):
    return Last()


def test_a_file_is_run_before_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("METASD_PLUGINS", "")
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    file = tmp_path / "parts.py"
    file.write_text(
        "from metasd_runtime import PromptLookup, register_drafter\n"
        'register_drafter("of-a-file", lambda target, text: PromptLookup())\n'
    )
    done = CliRunner().invoke(app, ["--plugin", str(file), "models", "--help"])
    assert done.exit_code == 0, done.output
    assert "of-a-file" in registry.DRAFTERS


def test_the_drafter_of_the_documentation_runs_as_it_stands(target):
    page = Path(__file__).parents[2] / "docs" / "decoding.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "class Bigrams" in block)
    assert block.count("\n") < 40
    names = {"__name__": __name__}
    exec(block, names)
    check_drafter(names["Bigrams"](), target)
    text = [1, 2, 3, 1, 2]
    drafter = names["Bigrams"]()
    drafter.start(text)
    assert drafter.propose(text, 3, None).tokens == [3, 1, 2]
