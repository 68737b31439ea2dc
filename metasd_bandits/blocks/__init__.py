"""One block out of several drafters' tokens: what to verify, whom to ask, what is learned.

A drafter's tokens form a tree (a chain is one too): ``parents[i]`` is the place of node i's parent
in the list, always before i, or -1 right behind the text. Each node has a *chance*: the
probability that it stands given that its parent stood. `allocation` shares out a block's nodes,
`calibration` learns the chances, `asking` decides which drafters are worth their time, `policy`
is the interface of all who choose sets, `replay` judges them on recorded rounds. The statements
they rest on are proved in docs/theory.md.
"""

from metasd_bandits.blocks.allocation import Merged, allocate, best_width, merge, path_chances
from metasd_bandits.blocks.asking import (
    Rate,
    best_rate,
    draft_length,
    marginal_gain,
    whom_to_ask,
)
from metasd_bandits.blocks.calibration import Calibrator, read_prior, save_prior
from metasd_bandits.blocks.policy import BlockUCB, Candidates, OneArm, SetPolicy, observed
from metasd_bandits.blocks.replay import NotIdentifiedError, replay_blocks

__all__ = [
    "BlockUCB",
    "Calibrator",
    "Candidates",
    "Merged",
    "NotIdentifiedError",
    "OneArm",
    "Rate",
    "SetPolicy",
    "allocate",
    "best_rate",
    "best_width",
    "draft_length",
    "marginal_gain",
    "merge",
    "observed",
    "path_chances",
    "read_prior",
    "replay_blocks",
    "save_prior",
    "whom_to_ask",
]
