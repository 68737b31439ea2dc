"""check_policy over every built-in policy, over sound foreign ones, and over broken ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from metasd_bandits import POLICIES, make_policy
from metasd_bandits.testing import CHECKS, ContractError, check_policy

sys.path.insert(0, str(Path(__file__).parent))
import broken

VARIANTS = [
    *sorted(POLICIES),
    "kl-ucb:family=gaussian",
    "thompson:model=gaussian",
    "thompson:draft_length=5,a=0.5,b=0.5",
    "sw-ucb:window=5",
    "fixed:arm=2",
    "ucb:carry=0.5",
    "sh:carry=0.5",
]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_built_in_policy_keeps_the_contract(name):
    report = check_policy(make_policy(name))
    assert len(report) == len(CHECKS)
    missing = {check for check, result in report.items() if result == "not offered"}
    symmetric = {
        "ties are uniform",
        "a mask lasts one round",
        "permuting arms permutes decisions",
    }
    allowed = symmetric if name.startswith("fixed") else set()
    assert missing == allowed | ({"hyperparameters stay"} if "carry" in name else set())


def test_a_sound_foreign_policy_passes():
    assert set(check_policy(broken.Sound).values()) == {"passed", "not offered"}


def test_three_methods_are_enough():
    report = check_policy(broken.Minimal())
    assert report["state round trips"] == "not offered"
    assert report["probabilities match frequencies"] == "not offered"
    assert report["masked arms are not chosen"] == "passed"


@pytest.mark.parametrize(
    ("policy", "check", "says"),
    [
        (broken.LowestIndexWinsTies, "ties are uniform", "break ties uniformly"),
        (broken.ReadsTheGlobalGenerator, "a seed fixes the run", "not from np.random"),
        (broken.LearnsFromNan, "bad feedback is refused", "reward=nan"),
        (broken.LearnsBeforeItRefuses, "bad feedback is refused", "validate first"),
        (broken.IgnoresMasks, "masked arms are not chosen", "skip masked arms"),
        (broken.ClaimsUniform, "probabilities match frequencies", "those of select()"),
        (broken.SavesTheSeedNotTheStream, "state round trips", "not its seed"),
        (broken.GivesItsStateAway, "saved state is a copy", "copy arrays"),
        (broken.SavesArrays, "state round trips", "JSON cannot hold"),
        (broken.SticksUntilARewardComes, "feedback may be late", "count pulls in flight"),
        (broken.LearnsManyUntilItRefuses, "many at once are learned in order", "or from none"),
        (broken.LearnsOneOfMany, "many at once are learned in order", "one by one"),
        (broken.RemembersEverything, "memory is bounded", "not the history"),
        (broken.ResetKeepsTheRecord, "a seed fixes the run", "forget everything"),
        (broken.PrefersTheLastArm, "permuting arms permutes decisions", "own record"),
    ],
)
def test_a_broken_policy_fails_for_the_right_reason(policy, check, says):
    with pytest.raises(ContractError, match=check) as failure:
        check_policy(policy)
    assert failure.value.check == check
    assert says in str(failure.value)
