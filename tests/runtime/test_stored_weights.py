"""Weights as they lie in a pool's file."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metasd_runtime.drafters.quantised import restored, stored


def weights(seed: int, rows: int, columns: int, spread: float) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {
        "matrix": spread * torch.randn(rows, columns, generator=draws),
        "norm": spread * torch.randn(columns, generator=draws),
    }


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 200),
    spread=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 9),
)
def test_what_comes_back(rows: int, columns: int, spread: float, seed: int) -> None:
    """Each weight errs by half a step of its row's scale, or of its group's of 64 differences."""
    base, own = weights(seed, rows, columns, 1.0), weights(seed + 10, rows, columns, spread)
    own = {key: base[key] + value for key, value in own.items()}
    sizes = {key: tuple(value.shape) for key, value in base.items()}
    whole = restored(stored("a", base), "a", sizes)
    step = base["matrix"].abs().amax(1, keepdim=True) / 127
    assert ((whole["matrix"] - base["matrix"]).abs() <= 0.501 * step).all()
    tensors = stored("b", own, whole)
    beside = restored(tensors, "b", sizes, whole)
    difference = own["matrix"] - whole["matrix"]
    for begin in range(0, columns, 64):
        group = slice(begin, begin + 64)
        step = difference[:, group].abs().amax(1, keepdim=True) / 7 + 1e-7
        error = (beside["matrix"] - own["matrix"])[:, group].abs()
        assert (error <= 0.51 * step + 1e-6 * own["matrix"][:, group].abs()).all()
    assert torch.equal(beside["norm"], own["norm"])


def test_a_difference_takes_half_the_room() -> None:
    base, own = weights(0, 64, 512, 1.0), weights(1, 64, 512, 1.0)
    whole = stored("a", base)

    def size(tensors: dict[str, torch.Tensor]) -> int:
        return sum(t.nbytes for key, t in tensors.items() if "matrix" in key)

    assert size(stored("b", own, base)) < 0.54 * size(whole)


def test_another_shape_is_refused() -> None:
    tensors = stored("a", weights(0, 4, 64, 1.0))
    with pytest.raises(KeyError, match=r"a.matrix has shape \(4, 64\), not \(4, 65\)"):
        restored(tensors, "a", {"matrix": (4, 65)})
