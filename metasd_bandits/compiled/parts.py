"""Parts of a flat array as arrays of their own: what slicing does, without its checks.

Compiled, a slice is clipped to its array, wherever it begins and ends, and a reshape is checked;
the views of one state make Numba write more code than the policy that reads them. Whoever calls
these answers for the bounds.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import lower_builtin, type_callable
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

__all__ = ["row", "table"]


def row(flat: NDArray[Any], start: int, size: int) -> NDArray[Any]:
    """``flat[start : start + size]``, shape (size,)."""
    return flat[start : start + size]


def table(flat: NDArray[Any], start: int, rows: int, columns: int) -> NDArray[Any]:
    """Consecutive rows that begin at `start`, shape (rows, columns)."""
    return flat[start : start + rows * columns].reshape((rows, columns))


@type_callable(row)
def _row_type(context):
    return lambda flat, start, size: flat


@type_callable(table)
def _table_type(context):
    return lambda flat, start, rows, columns: flat.copy(ndim=2)


@lower_builtin(row, types.Array, types.Integer, types.Integer)
@lower_builtin(table, types.Array, types.Integer, types.Integer, types.Integer)
def _lower(context, builder, signature, arguments):
    flat, start, *shape = [
        context.cast(builder, value, kind, types.intp) if isinstance(kind, types.Integer) else value
        for value, kind in zip(arguments, signature.args, strict=True)
    ]
    whole = make_array(signature.args[0])(context, builder, flat)
    part = make_array(signature.return_type)(context, builder)
    strides = [whole.itemsize]
    if len(shape) == 2:
        strides.insert(0, builder.mul(shape[1], whole.itemsize))
    populate_array(
        part,
        data=builder.gep(whole.data, [start]),
        shape=shape,
        strides=strides,
        itemsize=whole.itemsize,
        meminfo=whole.meminfo,
        parent=whole.parent,
    )
    return impl_ret_borrowed(context, builder, signature.return_type, part._getvalue())
