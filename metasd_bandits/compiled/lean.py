"""`numba.njit` without reference counting, and with it where a function allocates arrays."""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

__all__ = ["counted", "lean"]

_njit: Any = njit

# A function compiled lean, and those it calls (they inherit the option), may read and write the
# arrays it is given but make none: nothing is counted, so nothing could be freed. Counting the
# references of a dozen views in every call costs ten times a policy's arithmetic.
lean: Any = functools.partial(_njit, _nrt=False, no_cfunc_wrapper=True)

counted: Any = functools.partial(_njit, _nrt=True)
