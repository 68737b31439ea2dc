"""The pool that comes with the package drafts for its target, losslessly, and fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metasd_runtime.drafters.pool import load_pool, read_manifest, ready_pool
from metasd_runtime.metasd import MetaSD
from metasd_runtime.model.target import Target
from metasd_runtime.training.prompts import encode

PROMPTS = {
    "code": "Write a python function to find the largest number in a list.",
    "math": "Tom has 3 boxes with 12 apples each. He eats 5 apples. How many are left?",
}


def test_there_is_none_for_a_name_that_nobody_trained_for() -> None:
    assert ready_pool("no-such-target") is None


POOLS = {
    "smollm2-135m": ("eagle", ("code", "math", "qa", "summarization", "translation")),
    "smollm2-135m-black-box": ("language-model", ("code", "math", "translation")),
}


def test_together_they_are_small() -> None:
    folder = ready_pool("smollm2-135m")
    assert folder is not None
    assert {path.name for path in folder.parent.iterdir()} == set(POOLS)
    files = [file for name in POOLS for file in (folder.parent / name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 32 * 10**6


@pytest.mark.parametrize("name", POOLS)
def test_the_specialist_is_the_best_on_its_own_domain(name: str) -> None:
    """By the manifest's metrics: block divergence on held-out prompts."""
    path = ready_pool(name)
    assert path is not None
    kind, domains = POOLS[name]
    drafters = {drafter["name"]: drafter["metrics"] for drafter in read_manifest(path)["drafters"]}
    assert set(drafters) == {f"{kind}-{domain}" for domain in (*domains, "ofa")}
    for domain in domains:
        divergence = {d: sum(metrics[domain]["divergence"]) for d, metrics in drafters.items()}
        assert max(divergence, key=divergence.__getitem__) == f"{kind}-{domain}"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_its_output_is_the_targets_and_its_drafts_are_good(smollm: Any, name: str) -> None:
    path = ready_pool(name)
    assert path is not None
    drafters = {d.name: d for d in load_pool(path, Target(smollm.model, smollm.tokenizer))}
    for domain, prompt in PROMPTS.items():
        ids = torch.tensor([encode(smollm.tokenizer, prompt)])
        plain = smollm.model.generate(ids, max_new_tokens=64, do_sample=False)
        metasd = MetaSD(
            smollm.model,
            smollm.tokenizer,
            drafters=[drafters[f"{POOLS[name][0]}-{domain}"]],
            reward="bd",
        )
        output = metasd.generate(ids, max_new_tokens=64, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.tokens_per_round > 1.5
