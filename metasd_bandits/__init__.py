"""Bandit policies, rewards, regret, traces and replay for speculative decoding.

The ground floor of MetaSD: numpy, scipy and numba; no torch, no text.
"""

from metasd_bandits.carried import Carried
from metasd_bandits.checks import ConfigError
from metasd_bandits.compiled.policy import CompiledPolicy
from metasd_bandits.policy import Decision, Policy
from metasd_bandits.registry import POLICIES, make_policy, register_policy
from metasd_bandits.rewards import REWARDS, make_reward
from metasd_bandits.round import Round
from metasd_bandits.testing import check_policy
from metasd_bandits.traces.jsonl import Trace, TraceError, TraceHeader, TraceWriter, read_trace

__all__ = [
    "POLICIES",
    "REWARDS",
    "Carried",
    "CompiledPolicy",
    "ConfigError",
    "Decision",
    "Policy",
    "Round",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TraceWriter",
    "check_policy",
    "make_policy",
    "make_reward",
    "read_trace",
    "register_policy",
]
