"""A few instructions that numba does not offer, written in LLVM, the compiler below it.

LLVM translates them for any processor. numba's cache notices when a file in `loops/` has changed,
but not when this file or `numbers.py` has: after an edit here, touch those files as well.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64


def _reaching(context: Any, bits: Any, at: Any, mask: Any, limit: Any) -> Any:
    """A number whose bit q tells whether (bits[at + q] & mask) >= limit, neither being negative."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, at, mask, limit = values
        lanes = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), LANES)
        loaded = builder.load(_pointer(context, builder, signature.args[0], array, at, lanes))
        loaded.align = 4
        masked = builder.and_(loaded, _repeated(builder, lanes, mask))
        found = builder.icmp_signed(">=", masked, _repeated(builder, lanes, limit))
        return builder.bitcast(found, ir.IntType(LANES))

    return types.uint64(bits, at, mask, limit), generate


def _stream(context: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """target[at : at + 64] = source[start : start + 64], written past the caches.

    The address of target[at] must be a multiple of 64.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        element = context.get_data_type(signature.args[0].dtype)
        size = signature.args[0].dtype.bitwidth // 8
        lanes = ir.VectorType(element, 32 // size)
        zero = ir.Constant(ir.IntType(64), 0)
        for first in range(0, LANES, 32 // size):
            offset = ir.Constant(ir.IntType(64), first)
            place, begin = (builder.add(values[number], offset) for number in (1, 3))
            loaded = builder.load(
                _pointer(context, builder, signature.args[2], values[2], begin, lanes)
            )
            loaded.align = size
            stored = builder.store(
                loaded, _pointer(context, builder, signature.args[0], values[0], place, lanes), 32
            )
            flag = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            stored.set_metadata("nontemporal", flag)
        return zero

    return types.int64(target, at, source, start), generate


def _lowest_bit(context: Any, number: Any) -> Any:
    """The place of the lowest bit that is set; there must be one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, lanes: Any) -> Any:
    """To several elements of an array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), lanes.as_pointer())


def _repeated(builder: Any, lanes: Any, value: Any) -> Any:
    """A vector of one value."""
    number = ir.Constant(ir.IntType(32), 0)
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, number)
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes.count), [0] * lanes.count)
    return builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), zeros)


reaching: Any = intrinsic(_reaching)
stream: Any = intrinsic(_stream)
lowest_bit: Any = intrinsic(_lowest_bit)
