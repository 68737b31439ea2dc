"""Traces survive storage bit for bit, and damage is named, never passed over."""

import dataclasses
import json
import math
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_bandits import Round, Trace, TraceError, TraceHeader, TraceWriter, read_trace
from metasd_bandits.traces.columns import BATCH_ROWS, open_trace
from metasd_bandits.traces.parquet import convert, write_parquet
from metasd_bandits.traces.synthetic import SyntheticLog, SyntheticReader

HEADER = TraceHeader(("lookup", "suffix", "none"), 5, "ucb:beta=0.5", "be", {"seed": 7, "t": 0.1})
nan = math.nan
unit = st.floats(0.0, 1.0)
maybe_nan = st.one_of(st.just(nan), unit)


def per_arm(element):
    return st.none() | st.tuples(element, element, element)


@st.composite
def one_round(draw):
    """A round whose counts agree: accepted <= drafted, emitted <= accepted + 1."""
    drafted = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, drafted))
    return Round(
        query=draw(st.sampled_from(["q1", "q 2", "frage ü", ""])),
        index=draw(st.integers(0, 2**40)),
        arm=draw(st.integers(0, 2)),
        drafted=drafted,
        accepted=accepted,
        emitted=draw(st.integers(0, accepted + 1)),
        block_efficiency=draw(unit),
        block_divergence=draw(unit),
        reward=draw(unit),
        propensity=draw(st.just(nan) | st.floats(0.0, 1.0, exclude_min=True)),
        draft_seconds=draw(st.floats(0.0, 1e6)),
        verify_seconds=draw(unit),
        switch_seconds=draw(unit),
        owed=draw(st.integers(0, 4096)),
        step=draw(maybe_nan),
        rewards=draw(per_arm(maybe_nan)),
        tokens=draw(per_arm(st.integers(0, 6))),
        steps=draw(per_arm(maybe_nan)),
        depth=draw(st.integers(0, drafted)),
    )


traces = st.lists(one_round(), max_size=12, unique_by=lambda r: (r.query, r.index))


def write_lines(path, trace):
    with TraceWriter(path, trace.header) as writer:
        for r in trace:
            writer.write(r)


def make(n=3, **changes):
    base = Round("q", 0, 1, 5, 2, 3, 0.4, 0.5, 0.4, 0.25, rewards=(0.0, 0.4, nan), tokens=(1, 3, 0))
    return Trace(HEADER, [dataclasses.replace(base, index=i, **changes) for i in range(n)])


@settings(max_examples=60)
@given(traces)
def test_storage_is_lossless_both_ways(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("trace")
    trace = Trace(HEADER, rows)
    write_lines(folder / "a.jsonl", trace)
    convert(folder / "a.jsonl", folder / "b.parquet")
    convert(folder / "b.parquet", folder / "c.jsonl")
    assert (folder / "c.jsonl").read_bytes() == (folder / "a.jsonl").read_bytes()
    back = read_trace(folder / "c.jsonl")
    assert back.header == HEADER
    assert repr(back.rounds) == repr(rows)  # repr, for NaN equals itself there
    assert repr(list(open_trace(folder / "b.parquet").rounds())) == repr(rows)


def test_fields_that_turn_up_late_are_kept(tmp_path):
    n = BATCH_ROWS // 8
    plain = make(5 * n, rewards=None, tokens=None)
    late = make(2, query="late", rewards=(nan, 0.5, 1.0))
    late = Trace(HEADER, [*plain.rounds, *late.rounds])
    write_parquet(late, tmp_path / "late.parquet")
    assert repr(list(open_trace(tmp_path / "late.parquet").rounds())) == repr(late.rounds)


def test_a_torn_last_line_is_dropped_with_a_warning_and_appending_mends_it(tmp_path):
    path = tmp_path / "t.jsonl"
    write_lines(path, make(3))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=r"t.jsonl:4: the last line is cut off"):
        assert len(read_trace(path)) == 2
    write_lines(path, make(1))
    assert len(read_trace(path)) == 3


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "t.jsonl"
    write_lines(path, make(3))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_trace(path)) == 3
    write_lines(path, make(1))
    assert len(read_trace(path)) == 4


def test_joined_files(tmp_path):
    path = tmp_path / "t.jsonl"
    write_lines(path, make(2))
    one = path.read_text()
    path.write_text(one + one)
    assert [(r.query, r.index) for r in read_trace(path)] == [
        ("q", 0),
        ("q", 1),
        ("q#2", 0),
        ("q#2", 1),
    ]
    path.write_text(one + one.replace('"version":1', '"version":2'))
    with pytest.raises(TraceError, match=r":4 has trace version 2; this release reads 1"):
        read_trace(path)
    path.write_text(one + one.replace("lookup", "eagle"))
    with pytest.raises(TraceError, match=r":4 holds a trace with arms=.*eagle"):
        read_trace(path)


def damaged(change):
    def edit(line):
        values = json.loads(line)
        change(values)
        return json.dumps(values)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda line: line[:-5], "not JSON"),
        (lambda line: "[1, 2]", "not a JSON object"),
        (damaged(lambda v: v.pop("accepted")), "lacks accepted"),
        (damaged(lambda v: v.update(colour=1)), "unknown fields .*colour"),
        (damaged(lambda v: v.update(arm=3)), r"arm=3 is out of range; give an integer in \[0, 2\]"),
        (damaged(lambda v: v.update(arm="sufix")), "did you mean 'suffix'"),
        (damaged(lambda v: v.update(arm=None)), "arm=None is not an integer"),
        (damaged(lambda v: v.update(reward="high")), "reward='high' is not a number"),
        (damaged(lambda v: v.update(reward=None)), "reward=None is not a number"),
        (damaged(lambda v: v.update(query=3)), "query=3 is not text"),
        (damaged(lambda v: v.update(rewards=[0.1])), "one value for each of the 3"),
        (damaged(lambda v: v.update(tokens=[1, None, 2])), "tokens=None is not an integer"),
    ],
)
def test_damaged_lines_are_named(tmp_path, edit, message):
    path = tmp_path / "t.jsonl"
    write_lines(path, make(3))
    lines = path.read_text().splitlines()
    lines[2] = edit(lines[2])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=rf"t.jsonl:3.*{message}"):
        read_trace(path)
    with pytest.raises(TraceError, match=message):
        convert(path, tmp_path / "t.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.jsonl"]


def test_arms_may_be_named(tmp_path):
    path = tmp_path / "t.jsonl"
    write_lines(path, make(1))
    path.write_text(path.read_text().replace('"arm":1', '"arm":"none"'))
    assert read_trace(path).rounds[0].arm == 2


@pytest.mark.parametrize("content", [b"", b"{}\n", b"query,arm\n", b"\xff\xfe\x00", b"PAR1rubbish"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"no trace|no readable"):
        open_trace(path)


def altered(path, change):
    table = pq.read_table(path)
    changed = change(table)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["arm"]), "lacks the column 'arm'"),
        (lambda t: t.drop_columns(["rewards.suffix"]), "lacks the column 'rewards.suffix'"),
        (lambda t: t.append_column("rewards.eagle", t["reward"]), "no round has: 'rewards.eagle'"),
        (
            lambda t: t.set_column(1, "arm", pa.array(["eagle"] * len(t)).dictionary_encode()),
            "names arm 'eagle', which its header does not have",
        ),
        (
            lambda t: t.set_column(
                t.schema.get_field_index("reward"), "reward", pa.array([0.1, None, 0.2])
            ),
            "'reward' holds nulls",
        ),
        (
            lambda t: t.set_column(
                t.schema.get_field_index("index"), "index", pa.array(["a", "b", "c"])
            ),
            "'index' holds string",
        ),
        (
            lambda t: t.set_column(
                t.schema.get_field_index("rewards.none"), "rewards.none", pa.array([0.1, None, 0.2])
            ),
            "null for some arms",
        ),
    ],
)
def test_damaged_parquet_is_named(tmp_path, change, message):
    path = tmp_path / "t.parquet"
    write_parquet(make(3), path)
    altered(path, change)
    with pytest.raises(TraceError, match=message):
        list(open_trace(path).rounds())


def test_parquet_without_a_header_or_of_another_version_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    write_parquet(make(3), path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(TraceError, match="metasd-replay convert"):
        open_trace(path)
    text = table.schema.metadata[b"metasd-trace"].replace(b'"version":1', b'"version":9')
    pq.write_table(table.replace_schema_metadata({b"metasd-trace": text}), path)
    with pytest.raises(TraceError, match="version 9; this release reads 1"):
        open_trace(path)


def test_unwritable_and_unknown_targets(tmp_path):
    with pytest.raises(TraceError, match=r"\.parquet or \.jsonl"):
        convert(make(1), tmp_path / "t.csv")
    with pytest.raises(OSError, match=r"t\.parquet"):
        convert(make(1), tmp_path / "missing" / "t.parquet")


def test_batches_cut_anywhere_are_the_same_trace(tmp_path):
    reader = SyntheticReader(SyntheticLog(queries=7, rounds=11, seed=3))
    write_parquet(reader, tmp_path / "t.parquet")
    whole = list(reader.rounds())
    for rows in (1, 10, 1000):
        batches = list(open_trace(tmp_path / "t.parquet").batches(("arm", "rewards"), rows))
        assert max(len(b) for b in batches) == min(rows, 77)
        assert np.concatenate([b["arm"] for b in batches]).tolist() == [r.arm for r in whole]
        queries = np.concatenate([b.query for b in batches])
        assert queries.tolist() == [int(r.query[1:]) for r in whole]


@pytest.mark.slow
def test_ten_million_rounds_take_bounded_memory(tmp_path):
    """Peak memory of reading 10 million rounds is that of 2 million, but for the queries' names."""
    peaks = []
    for queries in (40_000, 200_000):
        path = tmp_path / f"{queries}.parquet"
        law = SyntheticLog(alphas=(0.4, 0.6), queries=queries, rounds=50)
        assert write_parquet(SyntheticReader(law), path) == queries * 50
        arrow = pa.total_allocated_bytes()
        tracemalloc.start()
        reader, n = open_trace(path), 0
        for batch in reader.batches(("arm", "rewards")):
            n += len(batch)
            arrow = max(arrow, pa.total_allocated_bytes())
        assert n == queries * 50
        peaks.append(tracemalloc.get_traced_memory()[1] + arrow)
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 160_000 * 250
    assert peaks[1] < 128e6
