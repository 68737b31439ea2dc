"""Rows that have left leave no memory behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import gc, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from metasd_runtime.drafters.language_model import LanguageModel
from metasd_runtime.drafters.suffix import Suffix
from metasd_runtime.metasd import MetaSD

torch.manual_seed(0)
torch.set_num_threads(1)
def tiny(layers):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)).eval()

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

target = tiny(3)
metasd = MetaSD(target, drafters=[
    "prompt-lookup", Suffix(max_tokens=100), "early-exit:1",
    LanguageModel(tiny(1), 64), LanguageModel(tiny(1), 64, "window", "streaming"),
], policy="uniform", reward="bd")
rows = (torch.randint(64, (10 + i % 30,)).tolist() for i in range(400))
outputs = metasd.generate_many(rows, max_batch=8, mode="heterogeneous", max_new_tokens=8)
done, sizes, kept = 0, [], []
for output in outputs:
    done += 1
    if "leak" in sys.argv:
        kept.append(output.sequences.expand(1000, -1).clone())
    del output
    if done in (200, 400):
        sizes.append(resident())
print(sizes[1] - sizes[0])
"""


def growth(*arguments: str) -> int:
    """Bytes by which a fresh process grows: 200 rows to warm up, then 200 more."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_200_rows_through_8_slots_leave_less_than_a_megabyte():
    assert growth() < 1_000_000
    assert growth("leak") > 1_000_000  # the measurement would see it
