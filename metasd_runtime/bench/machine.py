"""The machine a benchmark ran on, in a line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers

__all__ = ["machine"]


def machine() -> str:
    """Processor, cores, threads, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    if torch.cuda.is_available():
        model += f", {torch.cuda.get_device_name()}"
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
