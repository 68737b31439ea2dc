"""Other people's logs: read as their formats say, or refused with the line."""

import numpy as np
import pytest

from metasd_bandits import ConfigError, TraceError
from metasd_bandits.intervals import ReplayError
from metasd_bandits.replay.estimators import estimate
from metasd_bandits.replay.rejection import rejection_replay
from metasd_bandits.traces.importers import open_bandit_reader, vowpal_wabbit_reader
from metasd_bandits.traces.parquet import convert

OBD = """,timestamp,item_id,position,click,propensity_score,user_feature_0
0,2019-11-24 00:00:01+00:00,10,1,1,0.25,a
1,2019-11-24 00:00:01+00:00,2,2,0,0.25,a
2,2019-11-24 00:00:02+00:00,2,1,0,0.5,"b,c"
3,2019-11-24 00:00:03+00:00,33,1,0,0.25,b
"""


def test_open_bandit_dataset(tmp_path):
    path = tmp_path / "men.csv"
    path.write_text(OBD)
    reader = open_bandit_reader(path)
    assert reader.header.arms == ("2", "10", "33")
    rounds = list(reader.rounds())
    assert [(r.arm, r.reward, r.propensity, r.index) for r in rounds] == [
        (1, 1.0, 0.25, 0),
        (0, 0.0, 0.25, 1),
        (0, 0.0, 0.5, 2),
        (2, 0.0, 0.25, 3),
    ]
    first = list(open_bandit_reader(path, position=1).rounds())
    assert [r.arm for r in first] == [1, 0, 2]
    assert convert(reader, tmp_path / "men.parquet") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item_id,click\n1,0\n", "lacks the column position, propensity_score"),
        ("", "lacks the column"),
        (OBD.replace(",1,0.25,a", ",yes,0.25,a"), r"men.csv:2: click='yes' is not a number"),
        (OBD + "4,t,3,1,0\n", r"men.csv:6 is cut short"),
        (OBD.replace("0.5", "nan"), r"men.csv:4: propensity_score='nan' is not finite"),
        (OBD.splitlines()[0] + "\n", "holds no rounds"),
    ],
)
def test_damaged_open_bandit_files_are_refused(tmp_path, text, message):
    path = tmp_path / "men.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        list(open_bandit_reader(path).rounds())


def test_vowpal_wabbit_lines(tmp_path):
    path = tmp_path / "cb.txt"
    path.write_text("1:2:0.4 | a c\n3:0.5:0.2 | b d\n4:1.25:0.5 | a b c\n2:1:0.3 | b c\n")
    with pytest.raises(TraceError, match=r"costs from 0.5 to 2, outside \[0, 1\].*--costs"):
        vowpal_wabbit_reader(path)
    reader = vowpal_wabbit_reader(path, costs=(0, 2))
    assert reader.header.arms == ("1", "2", "3", "4")
    got = [(r.arm, r.reward, r.propensity) for r in reader.rounds()]
    assert got == [(0, 0.0, 0.4), (2, 0.75, 0.2), (3, 0.375, 0.5), (1, 0.5, 0.3)]
    with pytest.raises(ConfigError, match="least first"):
        vowpal_wabbit_reader(path, costs=(2, 0))


def test_vowpal_wabbit_rewards_written_as_negative_costs(tmp_path):
    path = tmp_path / "cb.txt"
    path.write_text("1:-1:0.5 2 |u x\n| unlabelled\n2:0:0.5 1 |u y:0.5\n")
    with pytest.warns(UserWarning, match=r"1 examples carry no label \(the first at line 2\)"):
        reader = vowpal_wabbit_reader(path)
    assert [(r.arm, r.reward) for r in reader.rounds()] == [(0, 1.0), (1, 0.0)]


def test_vowpal_wabbit_multiline_examples(tmp_path):
    path = tmp_path / "adf.txt"
    path.write_text(
        "shared | user\n| a:1\n1:0.25:0.7 | b:1\n| c:1\n\nshared | user\n0:1:0.1 | a\n| b\n"
    )
    reader = vowpal_wabbit_reader(path)
    assert reader.header.arms == ("0", "1", "2")
    assert [(r.arm, r.reward, r.propensity) for r in reader.rounds()] == [
        (1, 0.75, 0.7),
        (0, 0.0, 0.1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:2 | a\n", r"cb.txt:1: cannot read the label '1:2'"),
        ("1:0.5:0.4 2:0.5:0.4 | a\n", "cannot read the label '2:0.5:0.4'"),
        ("1:0.5:x | a\n", r"cb.txt:1: probability='x' is not a number"),
        ("| a\n", "no labelled example"),
        ("", "no labelled example"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*carry no label")
def test_damaged_vowpal_wabbit_files_are_refused(tmp_path, text, message):
    path = tmp_path / "cb.txt"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        vowpal_wabbit_reader(path)


def test_imported_logs_are_evaluated(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "cb.txt"
    arms = rng.integers(1, 4, 3000)
    costs = 1 - (rng.random(3000) < np.array([0.2, 0.5, 0.7])[arms - 1])
    path.write_text("".join(f"{a}:{c}:0.333333333 | x\n" for a, c in zip(arms, costs, strict=True)))
    reader = vowpal_wabbit_reader(path)
    results = estimate(reader, "3")
    assert {e.quantity for e in results} == {"reward per round"}
    for e in results:
        assert e.low < 0.7 < e.high
        assert (e.unit, e.n_units) == ("block of rounds", 1500)
    replayed = rejection_replay(reader, "fixed:arm=2")
    assert replayed["reward per round"].low < 0.7 < replayed["reward per round"].high
    with pytest.raises(ReplayError, match="no tokens"):
        replayed["tokens per round"]
    with pytest.raises(ReplayError, match="no tokens"):
        estimate(reader, "3", tokens=10)
