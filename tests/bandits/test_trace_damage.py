"""Damaged traces, logs and saved states: read as what they are, or refused by one named error."""

import dataclasses
import json
import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_bandits import (
    POLICIES,
    Round,
    Trace,
    TraceError,
    TraceHeader,
    TraceWriter,
    make_policy,
    read_trace,
)
from metasd_bandits.carried import Carried
from metasd_bandits.replay.summary import summarize
from metasd_bandits.traces.columns import by_query, open_trace
from metasd_bandits.traces.fields import FIELDS, Indexes
from metasd_bandits.traces.importers import open_bandit_reader, vowpal_wabbit_reader
from metasd_bandits.traces.parquet import convert, write_parquet

HEADER = TraceHeader(("lookup", "suffix"), 5, "ucb", "be")
ROUND = Round(
    "q",
    0,
    1,
    5,
    2,
    3,
    0.4,
    0.5,
    0.4,
    0.25,
    rewards=(0.0, 0.4),
    tokens=(1, 3),
    steps=(1.0, 1.5),
    step=1.2,
)
ROUNDS = [dataclasses.replace(ROUND, index=i, propensity=0.25 + i / 100) for i in range(40)]
ROUND_FIELDS = [f.name for f in dataclasses.fields(Round)]


def write(path, rounds=ROUNDS[:3], header=HEADER):
    with TraceWriter(path, header) as writer:
        for r in rounds:
            writer.write(r)
    return path


odd_numbers = st.sampled_from(
    [-3, -1, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 3.9, 1e300, 1.0, 1.5, 0.0, math.inf, math.nan]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_numbers | st.text(max_size=4)
    | st.sampled_from(["\ud800", "suffix", "ab"]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
    max_leaves=5,
)  # fmt: skip


def outcome(call):
    """What it returns, or the message it is refused with: (value, "") or (None, message)."""
    try:
        return call(), ""
    except TraceError as error:
        return None, str(error)


def in_range(name, value):
    low, high = FIELDS[name].low, FIELDS[name].high
    if value != value:
        return FIELDS[name].unknown
    whole = not FIELDS[name].whole or type(value) is int
    return whole and low <= value <= high and math.isfinite(value)


@settings(max_examples=400)
@given(st.sampled_from(ROUND_FIELDS), json_values)
def test_any_json_value_in_any_field_is_in_range_or_refused_by_name(tmp_path_factory, name, value):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    values = json.loads(lines[2])
    lines[2] = json.dumps({**values, name: value})
    path.write_text("\n".join(lines) + "\n")
    read, refused = outcome(lambda: read_trace(path).rounds[1])
    if refused:
        assert refused.startswith(f"{path}:3")
        assert name in refused
        assert len(refused) < 400 + len(str(path))
        return
    assert read.accepted <= read.drafted
    assert read.emitted <= min(6, read.accepted + 1)
    assert read.arm < 2
    for f in FIELDS:
        found = getattr(read, f)
        items = found if isinstance(found, tuple) else () if found is None else (found,)
        assert all(in_range(f, x) for x in items)
    back = path.with_suffix(".parquet")
    assert write_parquet(path, back) == 3
    assert repr(list(open_trace(back).rounds())) == repr(read_trace(path).rounds)


@settings(max_examples=200)
@given(
    st.sampled_from(["arms", "draft_length", "policy", "reward", "meta", "version"]), json_values
)
def test_any_json_value_in_the_header_is_read_or_refused(tmp_path_factory, name, value):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write(path, [dataclasses.replace(ROUND, drafted=0, accepted=0, emitted=1, tokens=None)])
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), name: value}) + "\n" + rest)
    trace, refused = outcome(lambda: read_trace(path))
    if refused:
        assert str(path) in refused
        return
    assert all(isinstance(arm, str) for arm in trace.header.arms)
    assert type(trace.header.draft_length) is int
    assert trace.header.draft_length >= 0
    convert(path, path.with_suffix(".parquet"))
    assert open_trace(path.with_suffix(".parquet")).header == trace.header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": 9, "drafted": 2}, r"accepted=9 is more than drafted .*in \[0, 2\]"),
        ({"emitted": -3}, r"emitted=-3 is out of range; give an integer in \[0, 6\]"),
        ({"emitted": 5}, r"emitted=5 is more than accepted \+ 1"),
        ({"emitted": 2**63}, "emitted=9223372036854775808 is out of range"),
        ({"reward": math.nan}, r"reward=nan is out of range; give a number in \[0, 1\]"),
        ({"depth": 6}, "depth=6 is more than drafted"),
        ({"index": True}, "index=True is not an integer"),
        ({"query": "\ud800"}, "lone surrogate"),
        ({"propensity": 0}, r"propensity=0 is out of range; give a number in \(0, 1\], or null"),
    ],
)
def test_what_a_round_cannot_be_is_refused_with_line_field_value_and_range(
    tmp_path, change, message
):
    path = write(tmp_path / "t.jsonl")
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), **change})
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=rf"t.jsonl:4: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    "line",
    [b'{"query":"\xe9"}', b"[" * 100_000 + b"]" * 100_000, b'{"index":' + b"1" * 5000 + b"}"],
)
def test_a_line_that_no_json_reader_takes_is_refused(tmp_path, line):
    path = write(tmp_path / "t.jsonl")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(TraceError, match=r"t.jsonl:5 is not JSON"):
        read_trace(path)


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path):
    path = write(tmp_path / "t.jsonl")
    plain = read_trace(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n\r\n")
    assert read_trace(path) == plain
    write(path, ROUNDS[:1])
    assert len(read_trace(path)) == 4


# -- whose query is it? --------------------------------------------------------------------------


def test_two_runs_in_one_file_have_queries_of_their_own(tmp_path):
    path = tmp_path / "t.jsonl"
    for _ in range(3):
        write(path, [dataclasses.replace(r, query=q) for q in "01" for r in ROUNDS[:2]])
    names = ["0", "1", "0#2", "1#2", "0#3", "1#3"]
    assert list(dict.fromkeys(r.query for r in read_trace(path))) == names
    assert summarize(path).queries == 6
    convert(path, tmp_path / "t.parquet")
    assert summarize(tmp_path / "t.parquet").queries == 6
    convert(tmp_path / "t.parquet", tmp_path / "back.jsonl")
    assert read_trace(tmp_path / "back.jsonl").rounds == read_trace(path).rounds
    assert [r.index for r in by_query(open_trace(path)).rounds()] == [0, 1] * 6


def test_a_query_named_like_another_runs_keeps_a_name_of_its_own(tmp_path):
    path = tmp_path / "t.jsonl"
    for names in (("0", "0#2"), ("0", "0#2"), ("0",)):
        write(path, [dataclasses.replace(ROUND, query=q) for q in names])
    read = [r.query for r in read_trace(path)]
    assert len(set(read)) == 5
    assert read[:2] == ["0", "0#2"]


def test_a_run_that_wrote_nothing_leaves_no_mark(tmp_path):
    path = write(tmp_path / "t.jsonl")
    before = path.read_bytes()
    TraceWriter(path, HEADER).close()
    assert path.read_bytes() == before


def test_rounds_that_come_twice_are_refused_and_the_mend_works(tmp_path):
    path = write(tmp_path / "t.jsonl", [*ROUNDS[:3], *ROUNDS[:3]])
    with pytest.raises(TraceError, match=r"t.jsonl:5: index=0 of query='q' is there already"):
        read_trace(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[0], *lines[4:]]))  # as the message says
    assert [r.query for r in read_trace(path)] == ["q"] * 3 + ["q#2"] * 3
    write_parquet(Trace(HEADER, [*ROUNDS[:3], *ROUNDS[:3]]), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"t.parquet, row 3: index=0 of query='q' is there"):
        list(open_trace(tmp_path / "t.parquet").batches(("arm",)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=30), st.integers(1, 30))
def test_repeated_indexes_are_found_where_a_set_finds_them(pairs, size):
    seen, first = set(), None
    for row, pair in enumerate(pairs):
        if pair in seen:
            first = row
            break
        seen.add(pair)
    indexes, found = Indexes(), None
    for start in range(0, len(pairs), size):
        part = np.array(pairs[start : start + size], dtype=np.int64)
        row = indexes.add(part[:, 0], part[:, 1])
        if row is not None:
            found = start + row
            break
    assert found == first


# -- Parquet -------------------------------------------------------------------------------------


def test_one_flipped_bit_of_a_parquet_file_is_found_or_harmless(tmp_path):
    path, hurt = tmp_path / "t.parquet", tmp_path / "hurt.parquet"
    write_parquet(Trace(HEADER, ROUNDS), path)
    whole, truth = path.read_bytes(), repr(ROUNDS)
    bits = 8 * len(whole)
    last = range(bits - 8 * 24, bits)  # where the footer's length stands
    chosen = [*last, *random.Random(0).sample(range(bits), 500)]
    found = 0
    for bit in chosen:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        hurt.write_bytes(flipped)
        read, refused = outcome(lambda: repr(list(open_trace(hurt).rounds())))
        assert str(hurt) in refused if refused else read == truth
        found += bool(refused)
    assert found > len(chosen) - 20


def test_a_page_that_another_tool_wrote_is_checked_too(tmp_path):
    """Without the file's own checksum, the pages' are verified."""
    path = tmp_path / "t.parquet"
    write_parquet(Trace(HEADER, ROUNDS), path)
    table = pq.read_table(path)
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    assert list(open_trace(path).rounds()) == ROUNDS
    data = bytearray(path.read_bytes())
    at = data.index(np.float64(0.25 + 7 / 100).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"t.parquet is no readable Parquet file"):
        list(open_trace(path).rounds())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "index",
            pa.array([0.0, 3.9]),
            r"row 0: column 'index' holds double \(0.0\), not integers",
        ),
        ("emitted", pa.array([3, -3]), r"row 1: emitted=-3 is out of range"),
        ("emitted", pa.array([3, 2**63], pa.uint64()), "row 1: emitted=9223372036854775808"),
        ("accepted", pa.array([2, 9]), r"row 1: accepted=9 is more than drafted"),
        ("reward", pa.array([0.1, math.nan]), "row 1: reward=nan is out of range"),
        ("reward", pa.array([True, False]), "column 'reward' holds bool"),
        ("propensity", pa.array([0.5, 0.0]), "row 1: propensity=0.0 is out of range"),
        ("rewards.suffix", pa.array([0.5, 1.5]), "row 1: rewards=1.5 is out of range"),
        ("tokens.lookup", pa.array([0.5, 1.5]), "column 'tokens.lookup' holds double"),
        ("steps.lookup", pa.array([1.0, math.inf]), "row 1: steps=inf is out of range"),
    ],
)
def test_columns_go_through_the_same_check(tmp_path, name, values, message):
    path = tmp_path / "t.parquet"
    write_parquet(Trace(HEADER, ROUNDS[:2]), path)
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    changed = table.set_column(place, name, values)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    for rows in (1, 100):  # rows are counted through the file, not through the batch
        with pytest.raises(TraceError, match=message if rows > 1 else name.split(".")[0]):
            list(open_trace(path).batches(tuple(ROUND_FIELDS), rows))


# -- other people's logs -------------------------------------------------------------------------

word = st.text("abcXYZ019_.-'", min_size=1, max_size=5)
costs = st.integers(0, 4).map(lambda n: n / 4)
chances = st.sampled_from(["1", "0.5", "1e-3", "0.25"])
feature = st.builds(lambda w, v: w + v, word, st.sampled_from(["", ":1", ":-0.5"]))
spaces = st.builds(
    lambda name, features: name + " " + " ".join(features), st.just("") | word, st.lists(feature)
)
behind = st.lists(spaces, min_size=1, max_size=2).map("|".join)
tag = st.just(" ") | word.map(lambda w: " " + w) | word.map(lambda w: f" '{w} ")
weight = st.sampled_from(["", " 1.0"])
plain_line = st.builds(
    lambda a, c, p, w, others, t, rest: (
        f"{a}:{c}:{p}{w}{''.join(f' {o}' for o in others)}{t}|{rest}",
        (str(a), c, float(p)),
        {str(a), *map(str, others)},
    ),
    st.integers(1, 12), costs, chances, weight, st.lists(st.integers(1, 12), max_size=3), tag,
    behind,
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(plain_line, min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_vowpal_wabbit_lines_are_read_back(tmp_path_factory, lines, end, marked):
    path = tmp_path_factory.mktemp("vw") / "cb.txt"
    text = "".join(line + end for line, _, _ in lines)
    path.write_bytes(b"\xef\xbb\xbf" * marked + text.encode())
    reader = vowpal_wabbit_reader(path, costs=(0, 1))
    assert set(reader.header.arms) == set().union(*(arms for _, _, arms in lines))
    read = [(reader.header.arms[r.arm], 1 - r.reward, r.propensity) for r in reader.rounds()]
    assert read == [label for _, label, _ in lines]


@settings(max_examples=100)
@given(st.data())
def test_vowpal_wabbit_examples_of_several_lines_are_read_back(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("vw") / "adf.txt"
    text, truth, most = "", [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        n = data.draw(st.integers(1, 4))
        chosen, cost, p = data.draw(st.integers(0, n - 1)), data.draw(costs), data.draw(chances)
        text += f"shared{data.draw(tag)}|{data.draw(behind)}\n"
        for place in range(n):
            label = f"{place}:{cost}:{p}" if place == chosen else ""
            text += f"{label}{data.draw(tag)}|{data.draw(behind)}\n"
        text += "\n"
        truth.append((str(chosen), cost, float(p)))
        most = max(most, n)
    path.write_text(text)
    reader = vowpal_wabbit_reader(path, costs=(0, 1))
    assert reader.header.arms == tuple(map(str, range(most)))
    read = [(reader.header.arms[r.arm], 1 - r.reward, r.propensity) for r in reader.rounds()]
    assert read == truth


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1:1:0.5 t1 | a", "cannot read the label 't1'"),
        ("'t1 1:1:0.5 | a", 'cannot read the label "\'t1"'),
        ("1:1:0.5| a", "touches the bar, which makes it a tag"),
        ("1:1:0.5", "has no bar"),
        ("1:1:0.5 2.5 | a", "cannot read the label '2.5'"),
        ("x:1:0.5 | a", "action='x' in 'x:1:0.5' is not a whole number"),
        ("0:1:0.5 | a", "action='0'"),
        ("1:1:0 | a", r"probability=0.0 is out of range; give a number in \(0, 1\]"),
        ("1:1:1.5 | a", "probability=1.5 is out of range"),
        ("1:inf:0.5 | a", "cost='inf' is not finite"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path, line, message):
    path = tmp_path / "cb.txt"
    path.write_text(f"1:1:0.5 | a\n{line}\n")
    with pytest.raises(TraceError, match=rf"cb.txt:2: .*{message}"):
        vowpal_wabbit_reader(path)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "log"
    for reader, start in (
        (vowpal_wabbit_reader, b"1:1:0.5 | "),
        (open_bandit_reader, b"item_id,position,click,propensity_score\n"),
    ):
        path.write_bytes(start + b"\xe9\n")
        with pytest.raises(TraceError, match="is not UTF-8"):
            reader(path)


# -- saved states --------------------------------------------------------------------------------


def learned(policy):
    policy.reset(3, 7)
    for _ in range(20):
        arm = policy.select()
        policy.update(arm, (0.2, 0.5, 0.9)[arm])
    return policy


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"fixed"}))
def test_every_policys_own_state_is_taken(name):
    policy = learned(make_policy(name))
    twin = make_policy(name)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert twin.state_dict() == policy.state_dict()


@settings(max_examples=300)
@given(
    st.sampled_from(["policy", "hyperparameters", "buffer", "stream"]),
    st.integers(-1, 60),
    json_values,
    st.booleans(),
)
def test_a_damaged_state_is_one_error_and_changes_nothing(part, place, value, carried):
    policy = learned(make_policy("ucb"))
    policy = Carried(policy) if carried else policy
    if carried:
        policy.begin(3)
    before = policy.state_dict()
    state = policy.state_dict()
    inner = state["policy"] if carried else state
    if isinstance(inner[part], list) and 0 <= place < len(inner[part]):
        inner[part][place] = value
    elif place < 0:
        del inner[part]
    else:
        inner[part] = value
    try:
        policy.load_state_dict(state)
    except ValueError:
        assert policy.state_dict() == before
    else:
        assert policy.select() in range(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("stream"), "lacks the list 'stream'"),
        (lambda s: s.update(buffer=[]), "does not begin with its arms"),
        (lambda s: s.update(stream=[-1, 1, 2, 3]), "its stream cannot be read"),
        (lambda s: s.update(stream=[0, 0, 0, 0]), "not all of them 0"),
        (lambda s: s["buffer"].pop(), "its buffer has"),
        (lambda s: s["buffer"].__setitem__(-20, -1.0), "counts must be finite|another layout"),
    ],
)
def test_a_damaged_state_says_what_is_wrong(change, message):
    state = learned(make_policy("ucb")).state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        make_policy("ucb").load_state_dict(state)
