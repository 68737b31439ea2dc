"""A policy's kernels are those of its class, whatever else stands in its file."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from metasd_bandits import registry
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.policies.ucb import UCB
from metasd_bandits.replay.players import make_player
from metasd_bandits.testing import ContractError, check_policy
from sim import RewardTable, simulate_bandit

sys.path.insert(0, str(Path(__file__).parent))
import two_policies

HERE = Path(__file__).parent
Fewest, Greedy = two_policies.Fewest, two_policies.Greedy
WideUCB, SquaredUCB = two_policies.WideUCB, two_policies.SquaredUCB

MEANS = [0.2, 0.9, 0.4]
ROUNDS = 300


def pulls(policy, square=False):
    policy.reset(3, seed=3)
    for _ in range(ROUNDS):
        arm = policy.select()
        policy.update(arm, MEANS[arm] ** 2 if square else MEANS[arm])
    return policy.pulls.tolist()


def replayed(policy):
    rewards = np.repeat(np.array(MEANS)[:, None], ROUNDS, axis=1)
    starts = np.arange(ROUNDS) == 0
    arms = make_player(policy, 3, seed=3).play(starts, rewards, np.ones((3, 1)))
    return np.bincount(arms, minlength=3).tolist()


def simulated(policy):
    runs = simulate_bandit(
        RewardTable(np.array([MEANS])), policy, horizon=ROUNDS, replications=2, seed=3
    )
    return runs.pulls[0, 0].astype(int).tolist()


@pytest.mark.parametrize("run", [pulls, replayed, simulated])
def test_two_policies_in_one_file_each_have_their_own(run):
    assert run(Fewest()) == [100, 100, 100]
    assert run(Greedy()) == [1, ROUNDS - 2, 1]


@pytest.mark.parametrize("run", [pulls, replayed, simulated])
def test_a_subclass_in_another_file_inherits_them(run):
    assert run(WideUCB()) == run(UCB(beta=0.7)) != run(UCB(beta=0.1))


def test_a_subclass_changes_one_of_them():
    assert pulls(SquaredUCB(beta=0.5)) == pulls(UCB(beta=0.5), square=True)
    assert pulls(SquaredUCB(beta=0.5)) != pulls(UCB(beta=0.5))


@pytest.mark.parametrize("policy", [Greedy, WideUCB])
def test_they_keep_the_contract(policy):
    assert set(check_policy(policy).values()) == {"passed"}


SCRIPT = """
import sys
from dataclasses import dataclass
sys.path.insert(0, {here!r})
from two_policies import *
for made, want in ((Fewest, [10, 10, 10]), (Greedy, [1, 28, 1]), (WideUCB, None)):
    policy = made()
    policy.reset(3, seed=3)
    for _ in range(30):
        arm = policy.select()
        policy.update(arm, [0.2, 0.9, 0.4][arm])
    assert want is None or policy.pulls.tolist() == want, policy.pulls
"""


def test_a_fresh_process_finds_them_on_disk(tmp_path):
    """The second process compiles nothing: every file of machine code is the first one's."""
    files = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(here=str(HERE))],
            env={**os.environ, "METASD_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)},
            cwd=HERE.parents[1],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found = tmp_path.rglob("*.nbc")
        files.append({path: path.stat().st_mtime_ns for path in found})
    assert files[0] == files[1]
    assert len(files[0]) >= 6  # select and update of each


@dataclass(frozen=True, eq=False)
class WithoutKernels(CompiledPolicy):
    name = "without-kernels"


@dataclass(frozen=True, eq=False)
class PlainKernels(UCB):
    name = "plain-kernels"
    compiled = UCB.compiled._replace(update=lambda s, arm, reward, cost, propensity: None)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (WithoutKernels, "declare the policy's kernels in its class"),
        (PlainKernels, "PlainKernels.compiled.update is .* decorate that function"),
    ],
)
def test_what_cannot_work_is_refused(policy, says):
    with pytest.raises(ContractError, match=says):
        check_policy(policy)


def test_the_policy_of_the_documentation_runs_as_it_stands(tmp_path, monkeypatch):
    text = (HERE.parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert block.count("\n") < 40
    (tmp_path / "policy_of_the_page.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))
    page = importlib.import_module("policy_of_the_page")
    assert pulls(page.OneOverN())[1] > 200
