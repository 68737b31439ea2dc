"""Logs of other people's bandits as traces: Open Bandit Dataset CSV, Vowpal Wabbit text.

They hold choices, rewards and propensities, but no tokens and no queries: the header's draft
length is 0, and every round belongs to the query ``""``.
"""

from __future__ import annotations

import csv
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from metasd_bandits import checks
from metasd_bandits.round import Round
from metasd_bandits.traces.columns import Reader, RoundReader
from metasd_bandits.traces.fields import FIELDS
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
        with path.open(newline="", encoding="utf-8-sig", errors="strict") as file:
            table = csv.DictReader(_named(path, file))
            missing = {"item_id", "position", "click", "propensity_score"} - set(
                table.fieldnames or ()
            )
            if missing:
                raise TraceError(f"{path} lacks the column {', '.join(sorted(missing))}")
            for row in table:
                where = f"{path}:{table.line_num}"
                if position is not None and _number(where, "position", row["position"]) != position:
                    continue
                if not row["item_id"]:
                    raise TraceError(f"{where}: item_id is empty")
                yield _Choice(
                    row["item_id"],
                    _field(where, "reward", "click", row["click"]),
                    _field(where, "propensity", "propensity_score", row["propensity_score"]),
                )

    arms = {choice.arm for choice in choices()}
    return _reader(path, sorted(arms, key=_natural), "click", choices)


def vowpal_wabbit_reader(path: str | Path, costs: tuple[float, float] | None = None) -> Reader:
    """A log of contextual-bandit examples in Vowpal Wabbit's text format.

    Both ``--cb`` (``action:cost:probability | features``) and ``--cb_adf`` (one line for each
    action, an optional ``shared`` line, a blank line between examples) are read. Before the first
    bar stand labels, then at most one tag: a word that touches the bar or begins with a quote.
    In ``--cb`` further whole numbers name other actions that could have been taken; in
    ``--cb_adf`` actions are numbered from 0 by their lines. An importance weight must be 1
    (``1.0`` in ``--cb``), since no estimator here weighs rounds. What stands behind the bar
    (namespaces, features) is ignored. Examples without a label are skipped, with a warning that
    counts them.

    Parameters
    ----------
    path : path-like
    costs : (float, float), optional
        The least and the largest cost; the reward is (largest - cost) / (largest - least).
        Default: (-1, 0) or (0, 1), whichever all costs lie in.

    Raises
    ------
    TraceError
        If a line is not of this format, a probability lies outside (0, 1], or costs lie outside
        their range; the message names the line.
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
    adf = _is_adf(path)
    for number, block in _blocks(path):
        label = _block_label(path, number, block, adf=adf)
        if label is None:
            skipped, first = skipped + 1, first or number
        else:
            yield label
    if skipped and warn:
        warnings.warn(
            f"{path}: {skipped} examples carry no label (the first at line {first}); skipped",
            stacklevel=2,
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", errors="strict") as file:
        for number, line in enumerate(_named(path, file), start=1):
            yield number, line.rstrip("\r\n")


def _blocks(path: Path) -> Iterator[tuple[int, list[_Line]]]:
    """Examples as (number of the first line, lines); single lines unless the file uses ADF."""
    block: list[_Line] = []
    adf = _is_adf(path)
    for number, text in _lines(path):
        if text.strip():
            block.append(_line(f"{path}:{number}", text, adf=adf))
        if block and (not text.strip() or not adf):
            yield number - len(block) + (1 if text.strip() else 0), block
            block = []
    if block:
        yield number - len(block) + 1, block


def _is_adf(path: Path) -> bool:
    """Whether examples span lines: told by a shared line, or a blank line between lines."""
    blank = False
    for _, text in _lines(path):
        if text.strip() and (blank or re.match(r"\s*shared[\s|]", text)):
            return True
        blank |= not text.strip()
    return False


class _Line(NamedTuple):
    """What stands before the first bar of a line."""

    shared: bool
    label: tuple[str, float, float] | None
    others: tuple[str, ...]


def _line(where: str, text: str, *, adf: bool) -> _Line:
    """Read labels and tag of a line, or refuse it."""
    head, bar, _ = text.partition("|")
    words = head.split()
    if not bar:
        raise TraceError(f"{where}: {text[:60]!r} has no bar; features stand behind ' |'")
    if words and not head[-1].isspace():
        if ":" in words[-1] or words[-1] == "shared":
            raise TraceError(
                f"{where}: {words[-1]!r} touches the bar, which makes it a tag; put a space between"
            )
        words.pop()
    elif words and words[-1].startswith("'"):
        words.pop()
    if adf and words == ["shared"]:
        return _Line(True, None, ())
    label, others = None, list[str]()
    for word in words:
        parts = word.split(":")
        if len(parts) == 3 and label is None:
            label = _label(where, word, parts, adf=adf)
        elif _WHOLE.fullmatch(word) and int(word) and not adf:
            others.append(str(int(word)))
        elif not (label is not None and _is_one(word)):
            raise TraceError(
                f"{where}: cannot read the label {word!r}; before the bar stand one "
                "action:cost:probability, for --cb other actions (whole numbers from 1), an "
                "importance weight of 1, and at most one tag at the end"
            )
    return _Line(False, label, tuple(others))


_WHOLE = re.compile(r"[0-9]{1,9}")


def _is_one(word: str) -> bool:
    try:
        return float(word) == 1.0
    except ValueError:
        return False


def _label(where: str, word: str, parts: list[str], *, adf: bool) -> tuple[str, float, float]:
    action, cost, probability = parts
    if not _WHOLE.fullmatch(action) or (int(action) == 0 and not adf):
        raise TraceError(
            f"{where}: action={action!r} in {word!r} is not a whole number; give one from "
            f"{0 if adf else 1}"
        )
    p = _field(where, "propensity", "probability", probability)
    return str(int(action)), _number(where, "cost", cost), p


def _block_label(path: Path, number: int, block: list[_Line], *, adf: bool) -> _Label | None:
    actions = [line for line in block if not line.shared]
    labels = [(place, line.label) for place, line in enumerate(actions) if line.label is not None]
    if not labels:
        return None
    if len(labels) > 1 or any(line.shared for line in block[1:]):
        raise TraceError(
            f"{path}:{number}: the example that begins here has {len(labels)} labels; one "
            "action:cost:probability is expected, and 'shared' in the first line only"
        )
    (place, (action, cost, probability)) = labels[0]
    if adf:
        return _Label(str(place), cost, probability, tuple(map(str, range(len(actions)))))
    return _Label(action, cost, probability, actions[0].others)


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


def _named(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """The lines of a file; text that is not UTF-8 is refused by line."""
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if "\0" in line:
                raise TraceError(f"{path}:{number} holds a NUL character; this is no text")
            yield line
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: behind line {number} is text that is not UTF-8: {error}"
        ) from None


def _number(where: str, name: str, text: str | None) -> float:
    """A word as a finite number."""
    if text is None:
        raise TraceError(f"{where} is cut short: {name} is missing")
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{where}: {name}={text!r} is not a number") from None
    if not math.isfinite(value):
        raise TraceError(f"{where}: {name}={text!r} is not finite")
    return value


def _field(where: str, field: str, name: str, text: str | None) -> float:
    """A word as the value of a round's field, under the name that the log gives it."""
    value: float = replace(FIELDS[field], name=name).read(where, _number(where, name, text))
    return value


def _natural(name: str) -> tuple[int, float | str]:
    """Numbers in their order, before words."""
    try:
        return 0, float(name)
    except ValueError:
        return 1, name
