"""A few instructions that numba does not offer, written in LLVM, the compiler below it.

LLVM translates them for any processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, register_jitable

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


def _same_bits(result: Any, argument: Any) -> Any:
    """An instruction that takes a number for one of another type with the same bits."""

    def same_bits(context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(result))

        return result(argument), generate

    return intrinsic(same_bits)


def _memory(context: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of the type that the array `like` has."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


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
float_of: Any = _same_bits(types.float32, types.uint32)
bits_of: Any = _same_bits(types.uint32, types.float32)
_memory_at: Any = intrinsic(_memory)


@register_jitable
def vector_at(address, size, like):  # type: ignore[no-untyped-def]
    """The array of `size` elements at an address, of the same type as `like`."""
    return carray(_memory_at(address, like), size)


@register_jitable
def to_bfloat16(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bfloat16; of a tie the even one."""
    bits = bits_of(value)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0xFFFF) if nan else np.uint16(rounded >> np.uint32(16))


@register_jitable
def of_bfloat16(half):  # type: ignore[no-untyped-def]
    return float_of(np.uint32(np.uint32(half) << np.uint32(16)))


@register_jitable
def to_float16(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to float16; of a tie the even one."""
    bits = bits_of(value)
    sign, bits = np.uint32(bits & np.uint32(0x80000000)), np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((bits >> np.uint32(13)) & np.uint32(1))
    # The exponent of float16 is smaller by 112.
    half = np.uint32(bits - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # The processor rounds denormal numbers, when they are added to one half.
    small = np.uint32(bits_of(float_of(bits) + np.float32(0.5)) - np.uint32(0x3F000000))
    half = small if bits < np.uint32(113 << 23) else half
    half = np.uint32(0x7C00) if bits >= np.uint32(0x477FF000) else half
    nan = np.uint32(np.uint32(0x7E00) | ((bits >> np.uint32(13)) & np.uint32(0x3FF)))
    half = nan if bits > np.uint32(0x7F800000) else half
    return np.uint16(half | (sign >> np.uint32(16)))


@register_jitable
def of_float16(half):  # type: ignore[no-untyped-def]
    sign = np.uint32((np.uint32(half) & np.uint32(0x8000)) << np.uint32(16))
    bits = np.uint32((np.uint32(half) & np.uint32(0x7FFF)) << np.uint32(13))
    number = np.uint32(bits + np.uint32(112 << 23))
    # Denormal numbers: the processor finds the exponent.
    one = np.uint32(113 << 23)
    small = bits_of(float_of(np.uint32(bits + one)) - float_of(one))
    number = small if bits < np.uint32(1 << 23) else number
    beyond = np.uint32(bits + np.uint32(224 << 23))
    quiet = np.uint32(1 << 22) if bits > np.uint32(0x0F800000) else np.uint32(0)
    number = np.uint32(beyond | quiet) if bits >= np.uint32(0x0F800000) else number
    return float_of(np.uint32(number | sign))
