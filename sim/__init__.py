"""Numba acceptance simulators, calibration to published tables, regret studies, plots."""
