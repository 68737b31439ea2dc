"""The best-fixed oracle, a baseline: every drafter alone on every prompt, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from metasd_bandits import checks
from metasd_runtime.drafters.auto import competing
from metasd_runtime.generation.output import Output
from metasd_runtime.generation.statistics import Statistics

if TYPE_CHECKING:
    from metasd_runtime.metasd import MetaSD

__all__ = ["BestFixed", "best_fixed"]


class BestFixed(NamedTuple):
    """What one fixed drafter can do, chosen in hindsight.

    Attributes
    ----------
    arm : str
        The best over all prompts together: pi* of the regret.
    per_prompt : tuple of str
        The best for each prompt: what a perfect router would use.
    statistics : dict of str to tuple of Statistics
        For each drafter, those of each prompt.
    """

    arm: str
    per_prompt: tuple[str, ...]
    statistics: dict[str, tuple[Statistics, ...]]


def best_fixed(
    metasd: MetaSD, prompts: Iterable[Any], *, by: str = "rounds", **arguments: Any
) -> BestFixed:
    """Decode every prompt with every drafter alone.

    Parameters
    ----------
    metasd : MetaSD
        Its competing drafters are compared; what its policy carries stays as it is.
    prompts : iterable of input_ids
    by : {"rounds", "seconds"}
        What the best needs least of: rounds, as in stopping-time regret, or wall time.
    **arguments
        As for `MetaSD.generate`.

    Raises
    ------
    ConfigError
        If there is no prompt or no drafter.
    """
    checks.choice("by", by, ("rounds", "seconds"))
    prompts = list(prompts)
    arms = tuple(drafter.name for drafter in competing(metasd.router))
    if not prompts or not arms:
        raise checks.ConfigError("best_fixed needs at least one prompt and one competing drafter")
    arguments = {**arguments, "policy": "fixed", "return_dict_in_generate": True}
    arguments.update(shadow=False, draft_all=False)
    runs: dict[str, tuple[Statistics, ...]] = {
        arm: tuple(_statistics(metasd.generate(ids, pool=[arm], **arguments)) for ids in prompts)
        for arm in arms
    }
    total = {arm: sum(getattr(s, by) for s in each) for arm, each in runs.items()}
    per_prompt = tuple(
        min(arms, key=lambda arm: getattr(runs[arm][i], by)) for i in range(len(prompts))
    )
    return BestFixed(min(arms, key=lambda arm: total[arm]), per_prompt, runs)


def _statistics(output: Any) -> Statistics:
    assert isinstance(output, Output)
    return output.statistics
