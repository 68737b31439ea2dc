"""Logs of other people's bandits as traces: Open Bandit Dataset CSV, Vowpal Wabbit text.

They hold choices, rewards and propensities, but no tokens and no queries: the header's draft
length is 0, and every round belongs to the query ``""``.
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from metasd_bandits import checks
from metasd_bandits.round import Round
from metasd_bandits.traces.columns import Reader, RoundReader
from metasd_bandits.traces.jsonl import TraceError, TraceHeader

__all__ = ["open_bandit_reader", "vowpal_wabbit_reader"]


class _Choice(NamedTuple):
    arm: str
    reward: float
    propensity: float


def open_bandit_reader(path: str | Path, position: int | None = None) -> Reader:
    """A log in the Open Bandit Dataset's CSV format (Saito et al. 2021, arXiv 2008.07146).

    Parameters
    ----------
    path : path-like
        A CSV with columns ``item_id``, ``position``, ``click`` and ``propensity_score``; others
        are ignored.
    position : int, optional
        Keep only recommendations shown in this place (the dataset has three per page, whose
        clicks depend on each other).

    Raises
    ------
    TraceError
        If a column is missing or a value is no number; the message names the line.
    """
    path = Path(path)

    def choices() -> Iterator[_Choice]:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = {"item_id", "position", "click", "propensity_score"} - set(
                table.fieldnames or ()
            )
            if missing:
                raise TraceError(f"{path} lacks the column {', '.join(sorted(missing))}")
            for row in table:
                where = f"{path}:{table.line_num}"
                if position is not None and _number(where, row["position"]) != position:
                    continue
                yield _Choice(
                    str(row["item_id"]),
                    _number(where, row["click"]),
                    _number(where, row["propensity_score"]),
                )

    arms = {choice.arm for choice in choices()}
    return _reader(path, sorted(arms, key=_natural), "click", choices)


def vowpal_wabbit_reader(path: str | Path, costs: tuple[float, float] | None = None) -> Reader:
    """A log of contextual-bandit examples in Vowpal Wabbit's text format.

    Both ``--cb`` (``action:cost:probability | features``) and ``--cb_adf`` (one line for each
    action, an optional ``shared`` line, a blank line between examples) are read; features are
    ignored. Examples without a label are skipped, with a warning that counts them.

    Parameters
    ----------
    path : path-like
    costs : (float, float), optional
        The least and the largest cost; the reward is (largest - cost) / (largest - least).
        Default: (-1, 0) or (0, 1), whichever all costs lie in.

    Raises
    ------
    TraceError
        If a label cannot be read, or costs lie outside their range.
    """
    path = Path(path)
    low, high, arms = math.inf, -math.inf, set[str]()
    for label in _vw_labels(path, warn=True):
        low, high = min(low, label.cost), max(high, label.cost)
        arms |= {label.action, *label.others}
    if not arms:
        raise TraceError(f"{path} holds no labelled example (action:cost:probability)")
    if costs is None:
        costs = (-1.0, 0.0) if low >= -1.0 and high <= 0.0 else (0.0, 1.0)
    least, largest = (checks.number("costs", c) for c in costs)
    if not least < largest:
        raise checks.ConfigError(f"costs={costs!r} must be two numbers, the least first")
    if low < least or high > largest:
        raise TraceError(
            f"{path} holds costs from {low:g} to {high:g}, outside [{least:g}, {largest:g}]; give "
            "their range with --costs LEAST,LARGEST"
        )

    def choices() -> Iterator[_Choice]:
        for label in _vw_labels(path, warn=False):
            reward = (largest - label.cost) / (largest - least)
            yield _Choice(label.action, reward, label.probability)

    return _reader(path, sorted(arms, key=_natural), "1 - cost", choices)


@dataclass(frozen=True)
class _Label:
    action: str
    cost: float
    probability: float
    others: tuple[str, ...]


def _vw_labels(path: Path, *, warn: bool) -> Iterator[_Label]:
    """The label of each example; a run of lines between blank ones is one example of ADF."""
    skipped, first = 0, 0
    for number, block in _blocks(path):
        label = _block_label(path, number, block)
        if label is None:
            skipped, first = skipped + 1, first or number
        else:
            yield label
    if skipped and warn:
        warnings.warn(
            f"{path}: {skipped} examples carry no label (the first at line {first}); skipped",
            stacklevel=2,
        )


def _blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Examples as (number of the first line, lines); single lines unless the file uses ADF."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = enumerate(file, start=1)
        block: list[str] = []
        start, adf = 1, _is_adf(path)
        for number, line in lines:
            text = line.strip()
            if text and not block:
                start = number
            if text:
                block.append(text)
            if block and (not text or not adf):
                yield start, block
                block = []
        if block:
            yield start, block


def _is_adf(path: Path) -> bool:
    """Whether examples span lines: told by a shared line, or a blank line between lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = [line.strip() for _, line in zip(range(10_000), file, strict=False)]
    while head and not head[-1]:
        head.pop()
    return "" in head or any(line.startswith("shared") for line in head)


def _block_label(path: Path, number: int, block: list[str]) -> _Label | None:
    actions = [line for line in block if not line.startswith("shared")]
    adf = len(block) > 1
    names, label = [], None
    for place, line in enumerate(actions):
        for token in line.partition("|")[0].split():
            action, *rest = token.split(":")
            if adf:
                action = str(place)
            if not rest and adf:
                continue  # a tag or an importance weight
            names.append(action)
            if not rest:
                continue
            where = f"{path}:{number + block.index(line)}"
            if len(rest) != 2 or label is not None:
                raise TraceError(
                    f"{where}: cannot read the label {token!r}; one action:cost:probability is "
                    "expected for each example"
                )
            label = (action, _number(where, rest[0]), _number(where, rest[1]))
    if adf:
        names = [str(place) for place in range(len(actions))]
    return None if label is None else _Label(*label, others=tuple(names))


def _reader(
    path: Path, arms: list[str], reward: str, choices: Callable[[], Iterator[_Choice]]
) -> Reader:
    header = TraceHeader(tuple(arms), 0, "imported", reward, {"imported from": path.name})
    places = {arm: i for i, arm in enumerate(arms)}
    if not arms:
        raise TraceError(f"{path} holds no rounds")

    def rounds() -> Iterator[Round]:
        for index, choice in enumerate(choices()):
            yield Round(
                "", index, places[choice.arm], 0, 0, 0, 0.0, 0.0, choice.reward, choice.propensity
            )

    return RoundReader(header, rounds)


def _number(where: str, text: str | None) -> float:
    if text is None:
        raise TraceError(f"{where} is cut short")
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{where}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise TraceError(f"{where}: {text!r} is not finite")
    return value


def _natural(name: str) -> tuple[int, float | str]:
    """Numbers in their order, before words."""
    try:
        return 0, float(name)
    except ValueError:
        return 1, name
