"""Step three of training: a drafter learns a corpus; resumable, and stopped by nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metasd_runtime.model.load import choose_dtype
from metasd_runtime.training.corpus import Batch, Text
from metasd_runtime.training.student import Student

__all__ = [
    "Learning",
    "TrainingError",
    "half",
    "learn",
    "soft_loss",
    "target_probabilities",
]


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what is kept, and where."""


@dataclass(frozen=True)
class Learning:
    """How a head learns.

    Attributes
    ----------
    tokens : int
        Answer tokens it is shown in all, repetitions counted: the budget.
    batch_tokens : int
        About as many in a step.
    rate : float
        Adam's learning rate at its peak; it rises for a twentieth of the steps and falls to a
        tenth along a cosine.
    depths : int
        Draft positions that are unrolled.
    checkpoint : int
        Steps between saved states.
    """

    tokens: int
    batch_tokens: int = 512
    rate: float = 2e-4
    depths: int = 4
    checkpoint: int = 20

    @property
    def steps(self) -> int:
        """Steps that show about `tokens` tokens."""
        return max(1, round(self.tokens / self.batch_tokens))

    def rate_at(self, step: int) -> float:
        """Of `steps`, the learning rate of one."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        fallen = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * fallen)))


def soft_loss(model: Student, batch: Batch, head: Tensor, depths: int) -> list[Tensor]:
    """Cross-entropy with the target's own distribution, at each depth.

    Parameters
    ----------
    head : (V, hidden)
        The target's output head at the tokens that can be drafted.
    """
    p = target_probabilities(batch, head)
    losses = []
    for out, rows in model(batch, depths):
        log_q = model.logits(out, head).log_softmax(-1)
        losses.append(-(p[rows] * log_q).sum(-1).mean())
    return losses


@torch.no_grad()
def target_probabilities(batch: Batch, head: Tensor) -> Tensor:
    """(answer tokens, V): the target's probabilities of the tokens that can be drafted."""
    logits = torch.nn.functional.linear(batch.last[batch.answer].to(head.dtype), head).float()
    return (logits - batch.log_z[batch.answer][:, None]).exp()


def learn(
    model: Student,
    texts: Iterator[list[Text]],
    head: Tensor,
    learning: Learning,
    path: Path,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train a drafter in place; continues from the state at `path` if there is one.

    Parameters
    ----------
    texts : iterator
        Batches, as `metasd_runtime.training.corpus.batches` makes them from a seed.
    path : Path
        Of the state that is saved now and then, and at the end.
    progress : callable
        Told the step, the steps in all and the loss.
    stop : callable
        Asked before every step; True ends it early, with the state saved.

    Returns
    -------
    bool
        Whether the budget was used up.

    Raises
    ------
    TrainingError
        If the loss is not finite: `model` and `path` hold the last good state.
    """
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    step = _resume(model, optimiser, path)
    batches = islice(texts, step, None)
    device = next(model.parameters()).device
    while step < learning.steps and not stop():
        batch = Batch.of(next(batches), model.hidden, device)
        with half(device):
            losses = soft_loss(model, batch, head, learning.depths)
        loss = torch.stack(losses).mean()
        if not math.isfinite(loss.item()):
            kept = _resume(model, optimiser, path)
            raise TrainingError(
                f"the loss became {loss.item()} at step {step}; the state of step {kept} is kept "
                f"in {path}. Lower the learning rate ({learning.rate:g}) and start again: it "
                "continues there"
            )
        for group in optimiser.param_groups:
            group["lr"] = learning.rate_at(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        progress(step, learning.steps, losses[0].item())
        if step % learning.checkpoint == 0:
            _save(model, optimiser, step, path)
    _save(model, optimiser, step, path)
    return step >= learning.steps


def half(device: torch.device) -> AbstractContextManager[Any]:
    """Products in bfloat16 where that is fast; sums, norms and rotations stay in float32."""
    if choose_dtype(None, device) != torch.bfloat16:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _save(model: Student, optimiser: Any, step: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimiser": optimiser.state_dict()}
    torch.save(state, beside)
    beside.replace(path)


def _resume(model: Student, optimiser: Any, path: Path) -> int:
    if not path.exists():
        _save(model, optimiser, 0, path)
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
