"""Target, drafters, verification and the decode loop: MetaSD on PyTorch and transformers."""

from metasd_runtime.draft import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.in_use import InUseError
from metasd_runtime.metasd import Interrupted, MetaSD, Output
from metasd_runtime.models import load_target
from metasd_runtime.sampling import Sampling
from metasd_runtime.statistics import Statistics

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
