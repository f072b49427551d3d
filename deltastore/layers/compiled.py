"""Compiled passes over memory: the door to numba.

Every function releases the interpreter lock and is compiled at its first use, then kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.extending import intrinsic, overload

__all__ = ["as_f32", "as_f64", "as_u32", "as_u64", "compiled", "lowest_bit", "overload", "types", "vector_loop"]


def _compile(**options: Any) -> Callable[[Any], Any]:
    def compiled(function: Any) -> Any:
        try:
            return njit(nogil=True, error_model="numpy", cache=True, **options)(function)
        except RuntimeError:  # no folder can be written, beside this file or below the user's: compiled in each process
            return njit(nogil=True, error_model="numpy", **options)(function)

    return compiled


compiled = _compile()
# Sums may be added in another order: they are vector instructions then.
vector_loop = _compile(fastmath={"reassoc", "contract"})


def _bitcast(source: types.Type, target: types.Type) -> Any:
    @intrinsic
    def cast(_typing: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return cast


as_f32: Any = _bitcast(types.uint32, types.float32)
as_u32: Any = _bitcast(types.float32, types.uint32)
as_f64: Any = _bitcast(types.uint64, types.float64)
as_u64: Any = _bitcast(types.float64, types.uint64)


def _count_zeros(_typing: Any, _value: Any) -> Any:
    """Give the number of zeros below the lowest set bit of a word that is not 0."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


lowest_bit: Any = intrinsic(_count_zeros)
