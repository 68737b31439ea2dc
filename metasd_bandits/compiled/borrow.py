"""Reading an array inside a compiled function without counting references to it.

A policy's state is a dozen views of one buffer, and a loop that counts references to them runs
some forty times slower. So engines write ``s = view(borrow(buffer))`` and ``borrow(stream)``.

The rule that keeps it safe: borrow only an argument of the function that borrows. Its caller
holds the array until the function returns; a local array may be freed after its last mention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils
from numba.extending import intrinsic

from metasd_bandits.compiled.interpreted import JIT_OFF

__all__ = ["borrow"]


def _borrow(typing_context, array):
    def codegen(context, builder, signature, arguments):
        borrowed = context.make_array(array)(context, builder, value=arguments[0])
        borrowed.meminfo = cgutils.get_null_value(borrowed.meminfo.type)
        borrowed.parent = cgutils.get_null_value(borrowed.parent.type)
        return borrowed._getvalue()

    return array(array), codegen


def _same(array):
    return array


borrow: Callable[..., Any] = _same if JIT_OFF else intrinsic(_borrow)
