"""One source of arithmetic: compiled, interpreted and live runs decide alike on the same draws."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from metasd_bandits import POLICIES, make_policy
from metasd_bandits.compiled.parts import row, table
from metasd_bandits.compiled.specialise import specialise
from metasd_bandits.compiled.state import named_views
from metasd_bandits.compiled.stream import make_stream, uniform

sys.path.insert(0, str(Path(__file__).parent))
import engine

HERE = Path(__file__).parent

NAMES = [
    *sorted(POLICIES),
    "kl-ucb:family=gaussian",
    "thompson:model=gaussian",
    "thompson:draft_length=4",
]
COSTS = np.array([1.0, 1.1, 1.3, 1.05])
DELAY = 3  # rounds until a reward comes back: four pulls are in flight at once


def given_rewards(rounds: int) -> np.ndarray:
    rng = np.random.default_rng(12)
    rewards = rng.integers(0, 5, (rounds, COSTS.size)) / 4.0
    rewards[rounds // 2 :] = rewards[rounds // 2 :, ::-1]
    return rewards


def live_run(name: str, rounds: int) -> tuple[list[int], list[float]]:
    policy = make_policy(name)
    policy.reset(COSTS.size, seed=21)
    rewards = given_rewards(rounds)
    arms, chances = [], []
    for t in range(rounds):
        arm, chance = policy.decide()
        arms.append(arm)
        chances.append(chance)
        if t >= DELAY:
            past = arms[t - DELAY]
            policy.update(
                past, rewards[t - DELAY, past], cost=COSTS[past], propensity=chances[t - DELAY]
            )
    return arms, chances


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine_and_the_live_policy_decide_alike(name):
    rounds = 40 if name.startswith("thompson") else 400
    policy = make_policy(name)
    module = specialise(engine, **policy.kernels())
    arms, chances = module.decisions(
        policy.fresh_buffer(COSTS.size), make_stream(21), given_rewards(rounds), COSTS, DELAY
    )
    live_arms, live_chances = live_run(name, rounds)
    assert arms.tolist() == live_arms
    assert chances == pytest.approx(live_chances, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_python_functions_decide_alike(name):
    """`py_func` of each kernel, called on views of NumPy arrays, without a compiled wrapper."""
    rounds = 60
    policy = make_policy(name)
    kernels = policy.kernels()
    buffer, stream = policy.fresh_buffer(COSTS.size), make_stream(21)
    s, rewards, arms, chances = named_views(buffer), given_rewards(rounds), [], []
    for t in range(rounds):
        arms.append(int(kernels["select"].py_func(s, stream)))
        chances.append(float(kernels["propensity"](s, arms[-1])))
        if t >= DELAY:
            past = arms[t - DELAY]
            kernels["update"].py_func(
                s, past, rewards[t - DELAY, past], COSTS[past], chances[t - DELAY]
            )
    assert (arms, chances) == live_run(name, rounds)


@pytest.mark.parametrize("tool", ["borrow", "kernel", "lean", "parts"])
def test_what_is_cached_is_keyed_by_how_it_was_compiled(tool, monkeypatch, tmp_path):
    """A module from before a change of it, linked with new ones, would corrupt memory."""
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    kernels = make_policy("ucb").kernels()
    before = specialise(engine, **kernels).__name__
    file = sys.modules[f"metasd_bandits.compiled.{tool}"].__file__
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a: read(path, *a) + "#" * (str(path) == file)
    )
    assert specialise(engine, **kernels).__name__ != before


def test_runs_without_a_compiler_decide_alike():
    """A process in which Numba compiles nothing: every function is plain Python."""
    rounds = 30
    script = (
        "import json, sys, warnings; warnings.simplefilter('ignore', RuntimeWarning)\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from test_policy_paths import NAMES, live_run\n"
        f"print(json.dumps({{n: live_run(n, {rounds}) for n in NAMES}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    interpreted = json.loads(done.stdout)
    for name in NAMES:
        arms, chances = live_run(name, rounds)
        assert interpreted[name][0] == arms, name
        assert interpreted[name][1] == pytest.approx(chances, rel=1e-12), name


def golden_run(name: str) -> dict[str, list[float]]:
    policy = make_policy(name)
    policy.reset(COSTS.size, seed=21)
    rewards = given_rewards(300)
    arms = []
    for t in range(300):
        arms.append(policy.select())
        policy.update(arms[-1], rewards[t, arms[-1]], cost=COSTS[arms[-1]])
    return {
        "first": arms[:20],
        "pulls": policy.pulls.tolist(),
        "next": policy.probabilities().round(9).tolist(),
    }


@pytest.mark.parametrize("name", NAMES)
def test_decisions_are_those_of_the_release_before(name):
    """Golden values; `python tests/bandits/test_policy_paths.py` writes them anew."""
    golden = json.loads((HERE / "golden_policies.json").read_text())
    run = golden_run(name)
    assert run["first"] == golden[name]["first"]
    assert run["pulls"] == golden[name]["pulls"]
    assert run["next"] == pytest.approx(golden[name]["next"], abs=1e-8)


if __name__ == "__main__":
    text = json.dumps({name: golden_run(name) for name in NAMES}, indent=None)
    (HERE / "golden_policies.json").write_text(text.replace("}, ", "},\n") + "\n")


@njit
def first_of(stream):
    return uniform(stream)


@njit
def parts_of(flat, start, size, rows, columns):
    return row(flat, start, size), table(flat, start, rows, columns)


def test_a_kernel_called_from_python_is_the_one_that_compiled_code_calls():
    one, other = make_stream(5), make_stream(5)
    assert [uniform(one) for _ in range(9)] == [first_of(other) for _ in range(9)]
    assert one.tolist() == other.tolist()
    assert pickle.loads(pickle.dumps(uniform))(one) == first_of(other)


def test_parts_of_an_array_are_views_of_it_and_hold_it():
    for flat in (np.arange(20.0), np.arange(20, dtype=np.uint64)):
        for start, size, rows, columns in [(0, 20, 4, 5), (3, 6, 2, 3), (7, 0, 0, 4), (2, 5, 1, 5)]:
            a, b = parts_of(flat.copy(), start, size, rows, columns)  # the copy lives on in them
            np.testing.assert_array_equal(a, flat[start : start + size])
            np.testing.assert_array_equal(b, table(flat, start, rows, columns))
    a, b = parts_of(flat, 4, 6, 2, 3)
    b[1, 2] = 99
    assert flat[9] == a[5] == 99
