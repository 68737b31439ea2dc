"""Per-request control: a router for one call, with its own draft length, policy or pool."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from metasd_bandits import Policy, Round, checks
from metasd_bandits.carried import Carried
from metasd_runtime.decoding.learned_router import policy_by_name
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.decoding.router import Router

__all__ = ["CallOptions", "router_for"]


@dataclass(frozen=True)
class CallOptions:
    """What a call may ask beyond Hugging Face's own arguments (`MetaSD.generate` explains each)."""

    output_logprobs: bool = False
    seed: int | None = None
    draft_length: int | None = None
    draft_threshold: float | None = None
    policy: str | Policy | None = None
    pool: Sequence[str] | None = None
    speculate: bool = True
    shadow: bool | None = None
    draft_all: bool | None = None
    trace: str | Path | None = None
    query: str | None = None
    on_round: Callable[[Round], None] | None = None

    @classmethod
    def take(cls, arguments: dict[str, Any]) -> CallOptions:
        """The options among keyword arguments, taken out of them."""
        return cls(**{name: arguments.pop(name) for name in cls.names() & arguments.keys()})

    @classmethod
    def names(cls) -> set[str]:
        """What the options are called."""
        return {field.name for field in dataclasses.fields(cls)}

    def modes(self, shadow: bool, draft_all: bool) -> tuple[bool, bool]:
        """Whether to draft in shadow, and with all at once; the session's where the call is silent.

        Raises
        ------
        ConfigError
            For both, or for a policy where nothing is chosen.
        """
        shadow = shadow if self.shadow is None else self.shadow
        draft_all = draft_all if self.draft_all is None else self.draft_all
        if draft_all and (shadow or self.policy is not None):
            other = "shadow" if shadow else "policy"
            raise checks.ConfigError(
                f"draft_all uses every drafter in every round, so {other} says nothing; "
                "leave one of them out"
            )
        return shadow and self.speculate, draft_all and self.speculate

    def settled_seed(self) -> int:
        """The seed, drawn from torch's generator where none was given."""
        if self.seed is None:
            return int(torch.randint(2**62, (1,)))
        return checks.integer("seed", self.seed, 0)

    def threshold(self, session: float) -> float:
        """The draft threshold, the session's where the call has none."""
        if self.draft_threshold is None:
            return session
        return checks.number("draft_threshold", self.draft_threshold, 0.0, 1.0, open_high=True)


def router_for(
    router: Router, options: CallOptions, tokenizer: PreTrainedTokenizerBase | None = None
) -> Router:
    """The session's router, or one of the call's own where the call differs.

    A call with a policy or a pool of its own neither uses nor changes what the session's policy
    has learned; one with another draft length goes on learning with it.

    Raises
    ------
    ConfigError
        For a drafter that is not in the session's pool, or an empty selection.
    """
    policy, pool = options.policy, options.pool
    if policy is not None:
        policy = policy_by_name(policy, tokenizer)
    if not options.speculate:
        return Router([NoDraft()], "fixed", "throughput", router.draft_length)
    length = router.draft_length if options.draft_length is None else options.draft_length
    if policy is None and pool is None:
        return router if length == router.draft_length else _longer(router, length)
    drafters = list(router.drafters[: router.n_competing])
    if pool is not None:
        names = list(pool)
        if isinstance(pool, str) or not names:
            raise checks.ConfigError(
                f"pool={checks.shown(pool)} selects nothing; "
                f"give a list of names, of {', '.join(router.arms)}"
            )
        by_name = dict(zip(router.arms, router.drafters, strict=True))
        drafters = [by_name[checks.choice("drafter in pool", n, router.arms)] for n in names]
    return Router(drafters, policy or _fresh(router), router.reward_name, length)


def _fresh(router: Router) -> Policy:
    """The session's policy for a query of its own, without what it carries."""
    policy = router.policy
    if not isinstance(policy, Carried):
        return policy  # it is reset at every query anyway
    if dataclasses.is_dataclass(policy.policy):
        return dataclasses.replace(policy.policy)  # hyperparameters only, no state
    return copy.deepcopy(policy.policy)


def _longer(router: Router, draft_length: int) -> Router:
    """The same pool and the same policy, learning on, under another draft length."""
    drafters = router.drafters[: router.n_competing]
    return Router(drafters, router.policy, router.reward_name, draft_length, router.scope)
