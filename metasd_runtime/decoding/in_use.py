"""Objects that serve one call at a time: a second call is refused, and the first goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["InUseError", "Part", "in_use"]


class InUseError(RuntimeError):
    """Something that keeps a state was asked to serve a second call in the middle of one."""


class Part(NamedTuple):
    """Something that keeps a state while it is used, and what the user calls it."""

    what: str
    part: object


_lock = threading.RLock()  # a finaliser may let parts go while others are being taken
_busy: set[int] = set()  # ids of objects that calls hold, and so keep alive


@contextmanager
def in_use(parts: Sequence[Part]) -> Iterator[None]:
    """Hold all of these for as long as the context lasts.

    Raises
    ------
    InUseError
        At once, if another call holds one of them, in this thread or any other.
    """
    mine: set[int] = set()
    try:
        with _lock:
            for what, part in parts:
                if id(part) in _busy:
                    raise InUseError(
                        f"{what} is in use by a call that has not ended; let it end first, or give "
                        "each thread a MetaSD of its own (several may share one model)"
                    )
            mine = {id(part) for _, part in parts}
            _busy.update(mine)
        yield
    finally:
        with _lock:
            _busy.difference_update(mine)
