"""The simulator's benchmark: its figures are medians of turns, its ratios taken within a turn."""

import pytest

from sim.bench import BY_HAND, OURS, Rates, medians, ratios


def turn(machine: float, **libraries: dict[str, float | str]) -> Rates:
    """One turn on a machine of the given speed; ours is as fast as the bare loop but for EXP3."""
    rates: Rates = {
        OURS: {"ucb": 20.0, "exp3": 20.0, "thompson": 10.0},
        BY_HAND: {"ucb": 20.0, "exp3": 10.0, "thompson": 10.0},
        **libraries,
    }
    return {
        who: {k: v if isinstance(v, str) else machine * v for k, v in row.items()}
        for who, row in rates.items()
    }


def test_ratios_do_not_depend_on_how_fast_the_machine_was_in_a_turn() -> None:
    libraries: dict[str, dict[str, float | str]] = {
        "one": {"ucb": 0.1, "thompson": 0.2},
        "two": {"ucb": 0.2, "exp3": 0.5, "thompson": 0.1},
        "broken": {"error": "ImportError: none"},
    }
    turns = [turn(machine, **libraries) for machine in (1.0, 0.4, 3.0)]
    found = ratios(turns)
    assert found["bare numba loop / metasd"] == pytest.approx(
        {"ucb": 1.0, "exp3": 0.5, "thompson": 1.0}
    )
    assert found["metasd / best library"] == pytest.approx(
        {"ucb": 100.0, "exp3": 40.0, "thompson": 50.0}
    )
    assert medians(turns)[OURS] == pytest.approx({"ucb": 20.0, "exp3": 20.0, "thompson": 10.0})
    assert medians(turns)["broken"] == {"error": "ImportError: none"}


def test_without_libraries_there_is_no_ratio_to_them() -> None:
    assert "metasd / best library" not in ratios([turn(1.0)])
