"""The decoding tutorial's Python blocks run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decoding.md"


@pytest.mark.model
@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path, monkeypatch, capsys, smollm):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    outputs = []
    ids = smollm.tokenizer("one two three one two three one", return_tensors="pt").input_ids
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        metasd = namespace["metasd"]
        outputs.append(metasd.generate(ids, max_new_tokens=12).tolist())  # type: ignore[attr-defined]
    assert (tmp_path / "run.jsonl").exists()
    assert capsys.readouterr().out.strip()
    plain = smollm.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert outputs[0] == plain.tolist()
    assert "again" in namespace["metasd"].router.arms  # type: ignore[attr-defined]
