"""Who proposed each token of a text, with which chance, and what did not stand."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.text import Text

from metasd_bandits import Round, Trace

__all__ = ["Piece", "as_html", "as_text", "pieces"]

_COLOURS = ("#2e7d32", "#1565c0", "#ad1457", "#6a1b9a", "#ef6c00", "#00838f", "#9e9d24", "#5d4037")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Who proposed what</title>
<style>
body {{ font: 16px/1.7 sans-serif; margin: 2em auto; max-width: 50em }}
pre {{ white-space: pre-wrap; font: inherit }}
span[title] {{ border-bottom: 2px solid currentColor }}
i {{ font-size: .75em; opacity: .6; text-decoration: line-through }}
b {{ opacity: .3; font-weight: normal }}
</style>
<p>{legend}</p>
<p>Point at a token to see who proposed it, with which chance. Tokens in black are the target's own;
small ones struck out were proposed there and did not stand. A bar ends a round.</p>
<pre>{body}</pre>
</html>
"""


class Piece(NamedTuple):
    """A token of the text.

    Attributes
    ----------
    text : str
    proposers : tuple of str
        Empty where the target added it itself.
    chance : float or None
        The chance it was given, where one was.
    others : tuple of (str, tuple of str, float)
        What else was proposed at its place: text, proposers, chance.
    ends_round : bool
    """

    text: str
    proposers: tuple[str, ...]
    chance: float | None
    others: tuple[tuple[str, tuple[str, ...], float], ...]
    ends_round: bool


def pieces(trace: Trace, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[Piece]:
    """The emitted text, token by token.

    Parameters
    ----------
    trace : Trace
        Of the call that emitted `tokens`, of one row.
    tokens : sequence of int
    decode : callable
        Tokens to text.
    """
    told, texts = list[Piece](), _texts(tokens, decode)
    for round_ in trace:
        told += _round(trace, round_, texts[len(told) : len(told) + round_.emitted], decode)
    return told


def _texts(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """What each token adds to the text: a character may take several."""
    texts, before = list[str](), ""
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[:end]))
        whole = text if not text.endswith("\N{REPLACEMENT CHARACTER}") else before
        texts.append(whole[len(before) :])
        before = whole
    return texts


def _round(
    trace: Trace, round_: Round, texts: Sequence[str], decode: Callable[[list[int]], str]
) -> Iterator[Piece]:
    names, nodes = trace.header.meta.get("proposers", ()), round_.nodes or ()
    path = [i for i, node in enumerate(nodes) if node.stood]
    for place, text in enumerate(texts):
        proposers, chance = tuple[str, ...](), None
        if place < round_.accepted and nodes:
            node = nodes[path[place]]
            proposers, chance = tuple(names[i] for i in node.owners), node.chance
        elif place < round_.accepted:
            proposers = (trace.header.arms[round_.arm],)
        above = path[place - 1] if 0 < place <= len(path) else -1
        others = tuple(
            (decode([node.token]), tuple(names[i] for i in node.owners), node.chance)
            for node in nodes
            if node.parent == above and node.stood is False and (place == 0 or above >= 0)
        )
        yield Piece(text, proposers, chance, others, place == len(texts) - 1)


def _colours(told: Sequence[Piece]) -> dict[str, str]:
    """A colour for each of those who proposed, in the order of appearance."""
    everybody = [p.proposers for p in told] + [o[1] for p in told for o in p.others]
    names = dict.fromkeys(proposers[0] for proposers in everybody if proposers)
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}


def as_text(told: Sequence[Piece]) -> Text:
    """For the terminal: a token in its proposer's colour, the chance behind it as a percentage."""
    colours, text = _colours(told), Text()
    for name, colour in colours.items():
        text.append(f" {name} ", f"bold {colour} reverse")
    text.append(" (percentages: chance given; struck out: did not stand)\n\n", "dim")
    for piece in told:
        for other, proposers, chance in piece.others:
            text.append(f"{other}{_percent(chance)}", f"dim strike {colours[proposers[0]]}")
        style = f"bold {colours[piece.proposers[0]]}" if piece.proposers else ""
        text.append(piece.text, style)
        if piece.chance is not None:
            text.append(_percent(piece.chance), f"dim {colours[piece.proposers[0]]}")
        if piece.ends_round:
            text.append("|", "dim")
    return text


def _percent(chance: float) -> str:
    return f"{100 * chance:.0f}".translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def as_html(told: Sequence[Piece]) -> str:
    """A page that needs nothing else."""
    colours = _colours(told)
    legend = " ".join(
        f'<span style="color:{colour}" title="proposer">{html.escape(name)}</span>'
        for name, colour in colours.items()
    )
    body = "".join(_piece_html(piece, colours) for piece in told)
    return _PAGE.format(legend=legend, body=body)


def _piece_html(piece: Piece, colours: dict[str, str]) -> str:
    struck = "".join(
        f"<i {_about(proposers, chance, colours)}>{html.escape(text)}</i>"
        for text, proposers, chance in piece.others
    )
    text = html.escape(piece.text)
    if piece.proposers:
        text = f"<span {_about(piece.proposers, piece.chance, colours)}>{text}</span>"
    return struck + text + ("<b>|</b>" if piece.ends_round else "")


def _about(proposers: Sequence[str], chance: float | None, colours: dict[str, str]) -> str:
    title = ", ".join(proposers) + ("" if chance is None else f": {chance:.2f}")
    return f'style="color:{colours[proposers[0]]}" title="{html.escape(title)}"'
