"""``policy="auto"``: all drafters' tokens in one block, or a bandit where arms must stand apart."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from metasd_bandits import Policy, checks
from metasd_runtime.decoding.drafter import Drafter
from metasd_runtime.decoding.learned_router import load_classifier
from metasd_runtime.decoding.no_draft import NoDraft
from metasd_runtime.decoding.router import Router, check_names
from metasd_runtime.drafters.merged import Merged, Reader
from metasd_runtime.model.target import Target

__all__ = ["APART", "AUTO", "arms", "competing", "is_auto", "merged_of"]

AUTO, APART = "auto", "ucb"
"""The policy, and the one that stands in for it where one block cannot be put together."""


def is_auto(policy: str | Policy | None) -> bool:
    """Whether a policy is ``auto`` or ``auto:router=PATH``."""
    return isinstance(policy, str) and policy.partition(":")[0] == AUTO


def arms(
    policy: str,
    drafters: Sequence[Drafter],
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
    apart: bool = False,
) -> tuple[list[Drafter], str]:
    """The arms and the bandit that ``auto`` stands for.

    Parameters
    ----------
    policy : str
        ``auto``, or ``auto:router=PATH`` with a classifier (as of `LearnedRouter`) that names the
        drafter for a prompt.
    drafters : sequence of Drafter
    target, tokenizer
        A target that cannot read a tree in one forward takes the bandit.
    apart : bool
        Whether arms must be there one by one: shadow drafting, all drafting, several lengths.

    Raises
    ------
    ConfigError
        For another option, a classifier without a tokenizer, or drafters of one name.
    """
    check_names(drafters)
    reader = _reader(policy, tokenizer)
    if apart or not _reads_trees(target):
        return list(drafters), APART
    if all(isinstance(drafter, NoDraft) for drafter in drafters):
        return list(drafters), "fixed"
    return [Merged(drafters, reader=reader)], "fixed"


def merged_of(router: Router) -> Merged | None:
    """The one arm of a router that puts blocks together."""
    arm = router.drafters[0]
    return arm if isinstance(arm, Merged) else None


def competing(router: Router) -> list[Drafter]:
    """The drafters of a session, whether they compete as arms or fill one block."""
    merged = merged_of(router)
    return list(router.drafters[: router.n_competing]) if merged is None else list(merged.given)


def _reader(policy: str, tokenizer: PreTrainedTokenizerBase | None) -> Reader | None:
    _, colon, option = policy.partition(":")
    if not colon:
        return None
    name, _, path = option.partition("=")
    if name != "router" or not path:
        raise checks.ConfigError(f"policy {policy!r}: write auto, or auto:router=PATH")
    if tokenizer is None:
        raise checks.ConfigError(f"policy {policy!r} needs the target's tokenizer")
    classify = load_classifier(path)
    return lambda tokens: classify(str(tokenizer.decode(list(tokens), skip_special_tokens=True)))


def _reads_trees(target: Target) -> bool:
    try:
        target.refuse_trees()
    except checks.ConfigError:
        return False
    return True
