"""Target, drafters, verification and the decode loop: MetaSD on PyTorch and transformers."""

from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.in_use import InUseError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import Interrupted, MetaSD, Output
from metasd_runtime.model.load import load_target

__all__ = [
    "Draft",
    "Drafter",
    "DrafterUnavailableError",
    "InUseError",
    "Interrupted",
    "MetaSD",
    "Output",
    "Sampling",
    "Statistics",
    "load_target",
]
