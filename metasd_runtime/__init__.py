"""Target, drafters, verification and the decode loop: MetaSD on PyTorch and transformers."""

from metasd_runtime.decoding.drafter import Draft, Drafter, DrafterUnavailableError
from metasd_runtime.decoding.in_use import InUseError
from metasd_runtime.decoding.sampling import Sampling
from metasd_runtime.drafters.fallback import Fallback
from metasd_runtime.drafters.prompt_lookup import PromptLookup
from metasd_runtime.drafters.registry import register_drafter
from metasd_runtime.drafters.testing import check_drafter
from metasd_runtime.generation.statistics import Statistics
from metasd_runtime.metasd import Interrupted, MetaSD, Output
from metasd_runtime.model.load import load_target
from metasd_runtime.model.target import Target

__all__ = [
    "Draft",
    "Drafter",
    "DrafterUnavailableError",
    "Fallback",
    "InUseError",
    "Interrupted",
    "MetaSD",
    "Output",
    "PromptLookup",
    "Sampling",
    "Statistics",
    "Target",
    "check_drafter",
    "load_target",
    "register_drafter",
]
