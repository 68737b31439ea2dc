"""Several drafters' joint law against its closed form; methods against what bounds them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.jobs import Jobs
from sim.several import CUTS, Drafter, Several
from sim.studies import blocks as study


def firsts(model: Several, count: int = 8_000) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and levels at the first position, (count, K)."""
    drawn = list(model.rounds(count, 1))
    tokens = np.array([[p.tokens[0] for p in proposals] for proposals in drawn])
    return tokens, np.array([[p.levels[0] for p in proposals] for proposals in drawn])


def test_rates_and_levels_follow_their_law_whatever_the_correlation() -> None:
    drafters = [Drafter((0.3,), (1.0,), 2, noise=0.4), Drafter((0.8,), (1.0,), 2, noise=1.0)]
    for correlation in (0.0, 0.9):
        tokens, levels = firsts(Several(drafters, correlation))
        right = tokens == 0
        assert right.mean(0) == pytest.approx([0.3, 0.8], abs=0.02)
        for i, level in itertools.product(range(2), range(len(CUTS) + 1)):
            there = right[levels[:, i] == level, i]
            error = 4.5 * 0.5 / np.sqrt(there.size)
            assert there.mean() == pytest.approx(drafters[i].chance(level), abs=error)


def test_drafters_are_right_together_as_a_gaussian_copula_says() -> None:
    drafters = [Drafter((0.5,), (1.0,), 1)] * 2
    for rho in (0.0, 0.5, 1.0):
        right = firsts(Several(drafters, rho, decoy=0.0))[0] == 0
        both = 0.25 + np.arcsin(rho) / (2 * np.pi)  # Sheppard's formula
        assert right.all(1).mean() == pytest.approx(both, abs=0.02)


def test_no_merged_block_beats_all_drafters_together_and_none_is_below_nothing() -> None:
    model = Several(study.DRAFTERS)
    rounds = list(model.rounds(300, 3))
    merger = study.Merger(model, 5, 0.0)
    for proposals in rounds:
        tokens, time = merger.play(proposals)
        longest = max(
            next((d for d, t in enumerate(p.tokens[:10]) if t), len(p.tokens[:10]))
            for p in proposals[:2]
        )
        assert 1 <= tokens <= 2 + longest  # a second choice adds one where a chain stops
        assert time in (1.0, pytest.approx(1.15))


def test_a_clairvoyant_choice_is_the_best_of_all_assignments() -> None:
    model = Several(study.DRAFTERS[:3])
    alone = study.Alone(model, list(model.rounds(7, 5)))
    every = [alone.of(np.array(arms)) for arms in itertools.product(range(3), repeat=7)]
    tokens, time = alone.clairvoyant()
    assert tokens / time == pytest.approx(max(n / t for n, t in every))


def test_the_command_gives_the_same_numbers_in_parallel_and_a_picture(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 30, "replications": 3, "slopes": (0.0, 0.1), "seed": 4}
    alone = study.blocks_study(**options)
    assert alone.to_json() == study.blocks_study(**options, jobs=Jobs(2, "threading")).to_json()
    picture = tmp_path / "blocks.png"
    arguments = ["blocks", "--rounds", "30", "--replications", "3", "--slopes", "0,0.1"]
    told = CliRunner().invoke(app, [*arguments, "--seed", "4", "--json", "--plot", str(picture)])
    assert json.loads(told.stdout)["rows"] == json.loads(alone.to_json())["rows"]
    assert picture.stat().st_size > 0


def test_merging_pays_where_nodes_are_free_and_dear_nodes_have_to_be_weighed() -> None:
    report = study.blocks_study(slopes=(0.0, 0.2), rounds=200, replications=6)
    at = {row["method"]: row for row in report.rows}
    assert at["merged, 5 nodes"]["against best single"].low > 1.0
    assert at["merged, 12 nodes"]["at 0"] > at["clairvoyant choice of one"]["at 0"]
    assert at["merged, 12 nodes"]["at 0.2"] < at["best single, hindsight"]["at 0.2"]
    assert at["merged, at most 12 by worth"]["at 0.2"] > at["merged, 12 nodes"]["at 0.2"]
