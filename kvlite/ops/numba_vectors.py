"""Vectors on a CPU, compiled by numba: rotated, multiplied, rounded into few bits and restored.

numba compiles these loops at their first use and keeps the result on disk.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Sums may be formed in any order; that numbers are finite is not assumed.
ORDERLESS = {"reassoc", "contract", "nsz"}
LARGEST = 65504.0
Loop = Callable[..., Any]


def jitted(loop: Loop) -> Loop:
    """Without the interpreter's lock, and kept on disk where there is a place for it."""
    return _jitted(loop, ORDERLESS)


def jitted_in_order(loop: Loop) -> Loop:
    """As `jitted`, with sums as they are written: two loops with the same sums give the same
    bits."""
    return _jitted(loop, {"contract"})


def _jitted(loop: Loop, fastmath: set[str]) -> Loop:
    options = {"fastmath": fastmath, "nogil": True}
    made: Loop
    try:
        made = numba.njit(**options, cache=True)(loop)
    except RuntimeError:
        made = numba.njit(**options)(loop)
    return made


@jitted
def hadamard(vector):
    """Rotate a vector in place, as `kvlite.cache.quantized.rotation` does."""
    size = vector.size & -vector.size
    for start in range(0, vector.size, size):
        half = 1
        while half < size:
            for first in range(start, start + size, 2 * half):
                for i in range(first, first + half):
                    one, other = vector[i], vector[i + half]
                    vector[i], vector[i + half] = one + other, one - other
            half *= 2
    share = np.float32(1 / np.sqrt(np.float32(size)))
    for i in range(vector.size):
        vector[i] *= share


@jitted
def from_half(bits):
    """The number that 16 bits are as a finite float16."""
    number = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
    number *= np.float32(2.0**112)
    return -number if bits & np.uint16(0x8000) else number


@jitted
def to_half(number):
    """The bits of the float16 nearest to a number it can hold; of two, the even one."""
    bits = np.float32(number).view(np.uint32)
    sign, size = (bits >> np.uint32(16)) & np.uint32(0x8000), np.uint32(bits & np.uint32(2**31 - 1))
    if size < np.uint32(113 << 23):
        return np.uint16(sign | np.uint32(np.rint(size.view(np.float32) * np.float32(2.0**24))))
    size += np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
    return np.uint16(sign | ((size - np.uint32(112 << 23)) >> np.uint32(13)))


@jitted
def put(vector, codes, scales, zeros, head, place, bits):
    """Round a vector, which is rotated for it, into one place, as `Quantized` holds it.

    Args:
        vector: `(dim,)` float32.
        codes, scales, zeros: `(heads, n, dim * bits / 8)` uint8 and `(heads, groups, n)` uint16.
    """
    hadamard(vector)
    groups, width, last = scales.shape[1], codes.shape[2], np.float32(2**bits - 1)
    size = vector.size // groups
    codes[head, place] = 0
    for group in range(groups):
        low, high = np.float32(LARGEST), np.float32(-LARGEST)
        for d in range(group * size, (group + 1) * size):
            vector[d] = min(max(vector[d], np.float32(-LARGEST)), np.float32(LARGEST))
            low, high = min(low, vector[d]), max(high, vector[d])
        least, share = to_half(low), to_half((high - low) / last)
        zeros[head, group, place], scales[head, group, place] = least, share
        zero, step = from_half(least), from_half(share)
        step = np.float32(1) if step == 0 else step
        for d in range(group * size, (group + 1) * size):
            code = min(max(np.rint((vector[d] - zero) / step), np.float32(0)), last)
            codes[head, place, d % width] |= np.uint8(int(code) << (d // width * bits))


@jitted
def take(codes, scales, zeros, head, place, bits, out):
    """What `put` put there, still rotated."""
    groups, width, mask = scales.shape[1], codes.shape[2], np.uint8(2**bits - 1)
    size = out.size // groups
    for plane in range(8 // bits):
        shift = np.uint8(plane * bits)
        for j in range(width):
            out[plane * width + j] = np.float32((codes[head, place, j] >> shift) & mask)
    for group in range(groups):
        step = from_half(scales[head, group, place])
        zero = from_half(zeros[head, group, place])
        for d in range(group * size, (group + 1) * size):
            out[d] = out[d] * step + zero


@jitted
def restore(codes, scales, zeros, head, place, count, bits, out):
    """A head's quantized vectors from a place on, still rotated, into the first rows of `out`."""
    if bits == 4:
        _restore_in(codes, scales, zeros, head, place, count, np.uint8(15), np.uint8(4), 2, out)
    elif bits == 8:
        _restore_in(codes, scales, zeros, head, place, count, np.uint8(255), np.uint8(0), 1, out)
    else:
        _restore_in(codes, scales, zeros, head, place, count, np.uint8(3), np.uint8(2), 4, out)


@jitted
def _restore_in(codes, scales, zeros, head, place, count, mask, bits, planes, out):
    """As `restore`, in so many parts of a byte."""
    width, groups = codes.shape[2], scales.shape[1]
    size = out.shape[1] // groups
    for i in range(count):
        for plane in range(planes):
            shift, at = np.uint8(plane) * bits, plane * width
            for j in range(width):
                out[i, at + j] = np.float32((codes[head, place + i, j] >> shift) & mask)
        for group in range(groups):
            step = from_half(scales[head, group, place + i])
            zero = from_half(zeros[head, group, place + i])
            for d in range(group * size, (group + 1) * size):
                out[i, d] = out[i, d] * step + zero


@jitted
def highest(numbers):
    """The largest of some numbers, by their bits: whole numbers are compared many at once."""
    best = np.int32(-(2**31))
    for i in range(numbers.size):
        bits = np.float32(numbers[i]).view(np.int32)
        best = max(best, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return np.int32(best ^ ((best >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@jitted
def close_exp(x):
    """e^x for x <= 0 in float32, many at once; 0 below e^-87."""
    whole = np.rint(x * np.float32(1.44269504))
    part = x - whole * np.float32(0.69314718)
    shape = np.float32(1.9875691500e-4) * part + np.float32(1.3981999507e-3)
    shape = shape * part + np.float32(8.3334519073e-3)
    shape = shape * part + np.float32(4.1665795894e-2)
    shape = shape * part + np.float32(1.6666665459e-1)
    shape = shape * part + np.float32(5.0000001201e-1)
    shape = shape * part * part + part + np.float32(1)
    power = np.int32(max(whole, np.float32(-127))) + np.int32(127)
    return np.int32(power << np.int32(23)).view(np.float32) * shape


def _rows_loop(dim: int) -> Loop:
    """`dot_rows`, where the compiler knows how long vectors are."""

    def loop(queries, vectors, at, products, i):
        for row in range(queries.shape[0]):
            product = np.float32(0)
            for d in range(dim):
                product += queries[row, d] * vectors[at, d]
            products[row, i] = product

    return jitted(loop)


_dot_64, _dot_128 = _rows_loop(64), _rows_loop(128)


@jitted
def dot_rows(queries, vectors, at, products, i):
    """The products of a head's rows `(rows, dim)` with one of its vectors `(n, dim)`, into
    `products[:, i]`."""
    if queries.shape[1] == 64:
        _dot_64(queries, vectors, at, products, i)
    elif queries.shape[1] == 128:
        _dot_128(queries, vectors, at, products, i)
    else:
        for row in range(queries.shape[0]):
            product = np.float32(0)
            for d in range(queries.shape[1]):
                product += queries[row, d] * vectors[at, d]
            products[row, i] = product


_BYTE, _NUMBER = ir.IntType(8), ir.IntType(32)
_FETCHING = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _NUMBER, _NUMBER, _NUMBER])


def write_fetch(builder: Any, address: Any) -> None:
    """Write the instruction that brings the bytes around an address nearer to the processor; it
    may be no address at all."""
    name = "llvm.prefetch.p0"
    known = builder.module.globals.get(name)
    fetching = known or ir.Function(builder.module, _FETCHING, name)
    place = builder.inttoptr(address, _BYTE.as_pointer())
    builder.call(fetching, [place, *(ir.Constant(_NUMBER, each) for each in (0, 2, 1))])


@intrinsic
def _fetch(context, address):
    def generate(context, builder, signature, arguments):
        write_fetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@jitted
def fetch_vector(vectors, at):
    """Bring one of many vectors `(n, dim)` float32 nearer."""
    place = vectors.ctypes.data + vectors.strides[0] * at
    for line in range(0, 4 * vectors.shape[1], 64):
        _fetch(place + line)
