"""Target, drafters, verification and the decode loop: MetaSD on PyTorch and transformers."""

from metasd_runtime.draft import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.metasd import Interrupted, MetaSD, Output
from metasd_runtime.models import load_target
from metasd_runtime.sampling import Sampling
from metasd_runtime.statistics import Statistics

__all__ = [
    "Draft",
    "Drafter",
    "DrafterUnavailableError",
    "Interrupted",
    "MetaSD",
    "Output",
    "Sampling",
    "Statistics",
    "load_target",
]
