"""The pool that comes with the package drafts for its target, losslessly, and fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metasd_runtime.metasd import MetaSD
from metasd_runtime.pool import load_pool, read_manifest, ready_pool
from metasd_runtime.target import Target
from metasd_runtime.training.prompts import encode

PROMPTS = {
    "code": "Write a python function to find the largest number in a list.",
    "math": "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many are left?",
}


def test_there_is_none_for_a_name_that_nobody_trained_for() -> None:
    assert ready_pool("no-such-target") is None


def test_it_is_small_and_knows_five_domains() -> None:
    path = ready_pool("smollm2-135m")
    assert path is not None
    assert sum(file.stat().st_size for file in path.iterdir()) <= 32 * 10**6
    names = {drafter["name"] for drafter in read_manifest(path)["drafters"]}
    domains = ("code", "math", "qa", "summarization", "translation", "ofa")
    assert names == {f"eagle-{domain}" for domain in domains}


@pytest.mark.model
@pytest.mark.slow
def test_its_output_is_the_targets_and_its_drafts_are_good(smollm: Any) -> None:
    path = ready_pool("smollm2-135m")
    assert path is not None
    drafters = {d.name: d for d in load_pool(path, Target(smollm.model, smollm.tokenizer))}
    for domain, prompt in PROMPTS.items():
        ids = torch.tensor([encode(smollm.tokenizer, prompt)])
        plain = smollm.model.generate(ids, max_new_tokens=64, do_sample=False)
        metasd = MetaSD(
            smollm.model, smollm.tokenizer, drafters=[drafters[f"eagle-{domain}"]], reward="bd"
        )
        output = metasd.generate(ids, max_new_tokens=64, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.tokens_per_round > 1.5
