"""What a round is worth to the bandit: BE, BD, tokens per round, tokens per time."""

from __future__ import annotations

import math
from collections.abc import Callable

from metasd_bandits import checks
from metasd_bandits.round import Round

__all__ = [
    "REWARDS",
    "block_divergence",
    "block_efficiency",
    "make_reward",
    "throughput",
    "tokens",
]

Reward = Callable[[Round, int], float]


def block_efficiency(round_: Round, draft_length: int) -> float:
    """r_BE = N_acc / N: accepted drafts over those really drafted (MetaSD, section 3).

    A block cut short by a limit is divided by what was drafted, so that the end of a text does
    not look like a bad drafter; a round without a draft scores 0.
    """
    return round_.block_efficiency


def block_divergence(round_: Round, draft_length: int) -> float:
    """r_BD: mean of 1 - TV(p_j, q_j) over all drafted positions (MetaSD, section 3).

    Positions behind the first rejection count too; the target's logits for them exist anyway.
    A round without a draft scores 0.
    """
    return round_.block_divergence


def tokens(round_: Round, draft_length: int) -> float:
    r"""Tokens of the round as a fraction of the most it can bring (BanditSpec's reward, scaled).

    .. math:: r = \frac{\text{emitted}}{N + 1}

    A round without a draft scores 1 / (N + 1), where block efficiency gives it 0; an uncut block
    scores (N r_BE + 1) / (N + 1), so both order drafters alike.
    """
    return round_.emitted / (draft_length + 1)


def throughput(round_: Round, draft_length: int) -> float:
    r"""Tokens per plain target step, as a fraction of the most a round can bring (ours).

    .. math:: r = \frac{\text{emitted}}{\text{step} \cdot (N + 1)}

    cut at 1, where *step* is the round's duration in units of one plain decoding step. It is the
    right reward where drafters cost differently: a plain round scores 1 / (N + 1).

    Raises
    ------
    ValueError
        If the round's duration was not measured, or is not positive.
    """
    if not 0.0 < round_.step < math.inf:
        raise ValueError(
            f"step={checks.shown(round_.step)} is not a positive, finite duration; the throughput "
            "reward needs rounds that were timed"
        )
    return min(1.0, round_.emitted / (round_.step * (draft_length + 1)))


REWARDS: dict[str, Reward] = {
    "be": block_efficiency,
    "bd": block_divergence,
    "tokens": tokens,
    "throughput": throughput,
}


def make_reward(name: str) -> Reward:
    """A reward by name: ``be``, ``bd``, ``tokens`` or ``throughput``.

    Each is a function ``(round, draft_length) -> float`` in [0, 1], draft_length being N.
    """
    return REWARDS[checks.choice("reward", name, REWARDS)]
