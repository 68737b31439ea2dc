"""The decoding tutorial's Python blocks run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from metasd_runtime import MetaSD
from metasd_runtime.drafters.auto import competing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decoding.md"


@pytest.mark.model
@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path, monkeypatch, capsys, smollm):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    namespace: dict[str, Any] = {}
    texts, arms = [], []
    ids = smollm.tokenizer("one two three one two three one", return_tensors="pt").input_ids
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        metasd = namespace["metasd"]
        texts.append(metasd.generate(ids, max_new_tokens=12).tolist())
        arms.append([drafter.name for drafter in competing(metasd.router)])
    assert (tmp_path / "run.jsonl").exists()
    assert capsys.readouterr().out.strip()
    plain = smollm.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert texts[0] == plain.tolist()
    assert "again" in arms[1]
    assert "eagle-code:dynamic" in arms[2]
    guesses = namespace["TwoGuesses"]()
    own = MetaSD(smollm.model, smollm.tokenizer, drafters=[guesses], policy="ucb", reward="bd")
    output = own.generate(ids, max_new_tokens=12, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert not own.router.disabled
    assert any(round_.depth for round_ in output.trace)
