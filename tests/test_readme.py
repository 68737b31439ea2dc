"""The README's Python runs as written, one block after the other, on the real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.model
@pytest.mark.slow
def test_python_blocks_run_in_order_and_their_plug_ins_are_lossless(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the README writes run.jsonl
    names: dict[str, object] = {}
    outputs: list[torch.Tensor] = []
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        before = names.get("metasd")
        # float32, where losslessness is equality
        exec(block.replace('("smollm2-135m"', '("smollm2-135m", dtype="float32"'), names)
        metasd = names["metasd"]
        if metasd is not before:
            ids = metasd.tokenizer("One, two, three, one, two,", return_tensors="pt").input_ids
            outputs.append(metasd.generate(ids, max_new_tokens=16, do_sample=False))
            plain = metasd.target.model.generate(ids, max_new_tokens=16, do_sample=False)
            assert torch.equal(outputs[-1], plain)
    assert len(outputs) == 3
    assert "length" in capsys.readouterr().out
