"""What rounds cost, in units of one plain decoding step of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metasd_bandits import checks

__all__ = ["CostTable", "Costs"]


class CostTable(NamedTuple):
    """Costs as compiled code reads them: per-drafter rows (K,), and two numbers."""

    block: NDArray[np.float64]  # draft N tokens and verify them
    switch: NDArray[np.float64]
    catch_up: NDArray[np.float64]
    prompt: int


@dataclass(frozen=True)
class Costs:
    """Time of a round: draft + verify, and a switch where another drafter had the last round.

    .. math:: \\text{step} = N d_i + v + [\\text{switched}] (s_i + u_i \\cdot \\text{owed})

    owed being the tokens (with the prompt) that drafter i has missed since its last round, whose
    keys and values it must compute. The first drafter's own prompt is no switch: every method
    pays it.

    Parameters
    ----------
    draft : float or sequence (K,), default 0.0
        d: time of one drafted token, at least 0.
    verify : float, default 1.0
        v: time of the target's forward over the block, above 0.
    switch : float or sequence (K,), default 0.0
        s: fixed time of a switch to drafter i.
    catch_up : float or sequence (K,), default 0.0
        u: time for each token owed.
    prompt : int, default 0
        Tokens of the prompt, owed by a drafter that is used for the first time.
    """

    draft: Any = 0.0
    verify: float = 1.0
    switch: Any = 0.0
    catch_up: Any = 0.0
    prompt: int = 0

    def table(self, n_arms: int, draft_length: int) -> CostTable:
        """The costs for `n_arms` drafters that draft N tokens, checked."""
        checks.number("verify", self.verify, 0.0, open_low=True)
        checks.integer("prompt", self.prompt, 0)
        draft, switch, catch_up = (
            _row(name, getattr(self, name), n_arms) for name in ("draft", "switch", "catch_up")
        )
        return CostTable(draft_length * draft + self.verify, switch, catch_up, self.prompt)


def _row(name: str, value: Any, n_arms: int) -> NDArray[np.float64]:
    row = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if row.ndim != 1 or row.size not in (1, n_arms):
        raise checks.ConfigError(
            f"{name}={checks.shown(value)} has {row.size} values; "
            f"give one, or one for each of the {n_arms} drafters"
        )
    for x in row.tolist():
        checks.number(name, x, 0.0)
    return np.array(np.broadcast_to(row, n_arms))
