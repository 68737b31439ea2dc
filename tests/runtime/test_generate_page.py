"""The Python blocks of docs/generate.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metasd_bandits import read_trace
from metasd_runtime.generation import settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "generate.md"


@pytest.mark.model
@pytest.mark.slow
def test_the_page_runs_as_written(tmp_path, monkeypatch, capsys, smollm):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert "early-exit:8@6" in capsys.readouterr().out
    rounds = read_trace(tmp_path / "full.jsonl").rounds
    assert rounds
    assert all(r.rewards is not None for r in rounds)
    text = namespace["text"][0]["generated_text"][-1]  # type: ignore[index]
    assert text["role"] == "assistant"


def test_what_the_page_calls_honoured_or_refused_is():
    table = PAGE.read_text().split("## What comes back")[0]
    for line in table.splitlines():
        names = set(re.findall(r"`([a-z_]+)(?:=\w+)?`", line)) & (
            settings.HONOURED | settings.REFUSED.keys()
        )
        if line.startswith("|") and "refused by name" in line:
            assert names
            assert names <= settings.REFUSED.keys()
        elif line.startswith("|"):
            assert names <= settings.HONOURED
