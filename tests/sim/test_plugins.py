"""Acceptance models and policies of other people: checked, registered, named on command lines."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import sim_plugins
from typer.testing import CliRunner

from metasd_bandits import ConfigError, make_policy, plugins, register_policy
from metasd_bandits.compiled.stream import uniform
from metasd_bandits.replay.cli import app as replay_app
from metasd_bandits.testing import ContractError
from sim import IID, Clustered, Language, check_acceptance, make_acceptance, register_acceptance
from sim.cli import app

PLUGIN = """
from dataclasses import dataclass
from metasd_bandits.policies.ucb import UCB
from metasd_bandits import register_policy
from sim import IID, register_acceptance

@register_policy
@dataclass(frozen=True, eq=False)
class Mine(UCB):
    name = "mine-of-a-file"

register_acceptance("half", lambda rates, n: IID([a / 2 for a in rates], n))
"""


@pytest.mark.parametrize(
    "model",
    [
        IID([0.3, 0.9]),
        IID([[0.3, 0.9], [0.5, 0.1]]),
        Clustered([0.3, 0.9]),
        Language([0.3, 0.9]),
        sim_plugins.AllOrNothing([0.2, 0.7]),
        sim_plugins.CompiledAllOrNothing([0.2, 0.7]),
    ],
)
def test_sound_models_pass(model):
    check_acceptance(model)


def broken(draft, **attributes):
    base = sim_plugins.AllOrNothing
    made = type("Broken", (base,), {"draft": staticmethod(draft), **attributes})
    return made([0.2, 0.7])


def unequal(model, memory, arm, place, stream):
    for _ in range(arm + 1):
        uniform(stream)
    return 0, 0.0, 0.5


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (broken(lambda *a: (5, 1.0, 1.0)), r"accepted 5; give a whole number in \[0, 4\]"),
        (broken(lambda *a: (1, 0.25, np.nan)), "divergence=nan; keep it in"),
        (broken(lambda *a: 1), "return .accepted, efficiency, divergence"),
        (broken(unequal), "call uniform.stream. equally often"),
        (broken(lambda *a: (0, 0.0, 0.0), draft_length=0), "draft_length=0; set it"),
        (broken(lambda model: (0, 0.0, 0.0)), "drafter 0 raised TypeError"),
    ],
)
def test_broken_models_are_told_what_to_fix(model, says):
    with pytest.raises(ContractError, match=says):
        check_acceptance(model)


def test_a_file_is_known_to_the_command_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("METASD_PLUGINS", "")
    file = tmp_path / "parts.py"
    file.write_text(PLUGIN)
    regret = ["regret", "--alphas", "0.4,0.8", "--tokens", "200", "--points", "3", "--json"]
    regret += ["--replications", "5"]

    def rows(*arguments):
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == 0, done.output
        return done.stdout.replace("mine-of-a-file", "ucb")

    mine = rows("--plugin", str(file), *regret, "--policy", "mine-of-a-file", "--model", "half")
    halved = [*regret[:2], "0.2,0.4", *regret[3:]]
    assert json.loads(mine) == json.loads(rows(*halved, "--policy", "ucb"))


@pytest.mark.parametrize(
    ("command", "given"), [(app, ["regret"]), (replay_app, ["summarize", "x"])]
)
def test_a_plugin_that_is_not_there_is_named(command, given, tmp_path):
    done = CliRunner().invoke(command, ["--plugin", str(tmp_path / "no.py"), *given])
    assert done.exit_code == 2
    assert "no.py" in done.output


def test_entry_points_are_found_by_name(monkeypatch):
    points = {
        "metasd.policies": EntryPoint("x", "sim_plugins:EveryOther", "metasd.policies"),
        "metasd.acceptance": EntryPoint("all-or-nothing", "sim:IID", "metasd.acceptance"),
    }
    plugins.load_plugins.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", lambda group: [points[group]])
    assert type(make_policy("every-other")).__name__ == "EveryOther"
    assert make_acceptance("all-or-nothing", [0.5], 3).draft_length == 3


def test_what_cannot_be_registered_is_refused():
    with pytest.raises(ConfigError, match="no policy; register a subclass"):
        register_policy(IID)
    with pytest.raises(ConfigError, match="give a class or a function"):
        register_acceptance("one", 1.0)


def test_the_model_of_the_documentation_runs_as_it_stands():
    page = Path(__file__).parents[2] / "docs" / "simulation.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "class AllOrNothing" in block)
    assert block.count("\n") < 40
    names = {"__name__": __name__}
    exec(block, names)
    check_acceptance(names["AllOrNothing"]([0.2, 0.7]))
