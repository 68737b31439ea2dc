"""Whether Numba was told not to compile (``NUMBA_DISABLE_JIT=1``), as for a debugger."""

from numba.core import config

__all__ = ["JIT_OFF"]

JIT_OFF: bool = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
