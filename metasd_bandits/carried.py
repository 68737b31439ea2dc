"""Carrying what was learned from query to query, with a stated rule of forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks
from metasd_bandits.policy import Decision, Policy

__all__ = ["Carried"]


class Carried(Policy):
    """A policy whose evidence outlives the query (the paper resets it for each).

    `begin` lets all evidence count for the share `keep` of what it did (`Policy.forget`): after
    m further queries a reward weighs keep**m, so about 1 / (1 - keep) queries are remembered.
    `reset` forgets everything, as for every policy.

    Parameters
    ----------
    policy : Policy
        What decides within a query.
    keep : float, default 1.0
        In [0, 1]. 1 forgets nothing; 0 is the paper's reset per query.

    Examples
    --------
    >>> from metasd_bandits import make_policy
    >>> policy = Carried(make_policy("ucb"), keep=0.5)
    >>> policy.begin(n_arms=2, seed=0)
    >>> for _ in range(10):
    ...     arm = policy.select()
    ...     policy.update(arm, [0.2, 0.8][arm])
    >>> policy.begin(n_arms=2)  # the next query starts from half the evidence
    >>> policy.policy.means.round(2).tolist()
    [0.2, 0.8]
    """

    def __init__(self, policy: Policy, keep: float = 1.0) -> None:
        self.policy = policy
        self.keep = checks.number("keep", keep, 0.0, 1.0)
        self.name = f"{policy.name}, carried"  # type: ignore[misc]
        self.symmetric = policy.symmetric  # type: ignore[misc]
        self._n_arms = 0

    def __repr__(self) -> str:
        return f"Carried({self.policy!r}, keep={self.keep})"

    def reset(self, n_arms: int, seed: int | None = None) -> None:
        self.policy.reset(n_arms, seed)
        self._n_arms = n_arms

    def begin(self, n_arms: int, seed: int | None = None) -> None:
        """Start a query; the first one resets, later ones forget in part.

        Raises
        ------
        ValueError
            If the number of arms changed: `rearrange` says which is which.
        """
        if self._n_arms == 0:
            self.reset(n_arms, seed)
        elif n_arms != self._n_arms:
            raise ValueError(
                f"{self._n_arms} arms were carried but {n_arms} begin; call rearrange() first"
            )
        else:
            self.policy.forget(self.keep, seed)

    def select(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> int:
        return self.policy.select(available)

    def decide(self, available: Sequence[bool] | NDArray[np.bool_] | None = None) -> Decision:
        return self.policy.decide(available)

    def update(self, arm: int, reward: float, **round_: Any) -> None:
        self.policy.update(arm, reward, **round_)

    def update_many(self, arms: Sequence[int], rewards: Sequence[float], **rounds: Any) -> None:
        self.policy.update_many(arms, rewards, **rounds)

    def probabilities(
        self, available: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        return self.policy.probabilities(available)

    def forget(self, keep: float, seed: int | None = None) -> None:
        self.policy.forget(keep, seed)

    def rearrange(self, arms: Sequence[int | None]) -> None:
        self.policy.rearrange(arms)
        self._n_arms = len(arms)

    def state_dict(self) -> dict[str, Any]:
        return {"keep": self.keep, "n_arms": self._n_arms, "policy": self.policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = {"keep", "n_arms", "policy"} - set(state if isinstance(state, dict) else ())
        if missing:
            raise ValueError(f"this state is damaged: it lacks {', '.join(sorted(missing))}")
        if state["keep"] != self.keep:
            raise ValueError(f"this state keeps {state['keep']}, not {self.keep}")
        n_arms = checks.integer("n_arms", state["n_arms"], 0)
        inner = state["policy"]
        saved = inner.get("buffer") if isinstance(inner, dict) else None
        if isinstance(saved, list) and saved and saved[0] != n_arms:
            raise ValueError(f"this state is damaged: n_arms={n_arms}, but its policy differs")
        self.policy.load_state_dict(inner)
        self._n_arms = n_arms
