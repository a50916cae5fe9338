"""Vectors in few bits on a CPU, compiled by numba: rounded, and restored many at once.

Restored ones stay in the processor's cache until they are multiplied.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_jit import jitted
from kvlite.ops.numba_llvm import (
    BYTES,
    FLOATS,
    LANES,
    PLACES,
    everywhere,
    load,
    place,
    product_sum,
)
from kvlite.ops.numba_vectors import dot_rows, hadamard, multiply, weigh

LARGEST = 65504.0
# Vectors that are restored at once.
RESTORED = 64


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
    """Round a vector `(dim,)` float32, which is rotated for it, into one place of codes `(heads, n,
    dim * bits / 8)` uint8, scales and zeros `(heads, groups, n)` uint16, as `Hadamard` holds
    it."""
    hadamard(vector)
    groups, width, last = scales.shape[1], codes.shape[2], np.float32(2**bits - 1)
    size = vector.size // groups
    for group in range(groups):
        part = vector[group * size : (group + 1) * size]
        for d in range(size):
            part[d] = min(max(part[d], np.float32(-LARGEST)), np.float32(LARGEST))
        low, high = part[0], part[0]
        for d in range(size):
            low, high = min(low, part[d]), max(high, part[d])
        least, share = to_half(low), to_half((high - low) / last)
        zeros[head, group, place], scales[head, group, place] = least, share
        zero, step = from_half(least), from_half(share)
        step = np.float32(1) if step == 0 else step
        for d in range(size):
            part[d] = min(max(np.rint((part[d] - zero) / step), np.float32(0)), last)
    own = codes[head, place]
    own[:] = 0
    for first in range(0, vector.size, width):
        plane, shift = vector[first : first + width], np.int32(first // width * bits)
        for d in range(width):
            own[d] |= np.uint8(np.int32(plane[d]) << shift)


@intrinsic
def _restore_lanes(context, codes, shift, mask, step, zero, out):
    def generate(context, builder, signature, arguments):
        codes, shift, mask, step, zero, out = arguments
        given = builder.zext(load(builder, codes, 0, BYTES), PLACES)
        shifted = builder.lshr(given, everywhere(builder, shift))
        numbers = builder.sitofp(builder.and_(shifted, everywhere(builder, mask)), FLOATS)
        every = everywhere(builder, step), everywhere(builder, zero)
        made = product_sum(builder, every[1], numbers, every[0])
        builder.store(made, place(builder, out, 0, FLOATS), align=4)
        return context.get_dummy_value()

    real, whole = types.float32, types.int32
    return types.void(types.intp, whole, whole, real, real, types.intp), generate


@jitted
def restore(codes, scales, zeros, places, bits, out):
    """A head's vectors at some places, as `put` put them there, still rotated, into the first rows
    of `out`.

    Args:
        codes, scales, zeros: `(n, dim * bits / 8)` uint8 and `(groups, n)` uint16.
        places: `(some,)` int64.
        out: `(some or more, dim)` float32.
    """
    width, groups, dim = codes.shape[1], scales.shape[0], out.shape[1]
    size, mask = dim // groups, np.int32(2**bits - 1)
    steps, least = np.empty(places.size, np.float32), np.empty(places.size, np.float32)
    for group in range(groups):
        own_scales, own_zeros = scales[group], zeros[group]
        for i in range(places.size):
            steps[i] = from_half(own_scales[places[i]])
            least[i] = from_half(own_zeros[places[i]])
        at, end = group * size, (group + 1) * size
        while at < end:
            plane = at // width
            some, shift = min((plane + 1) * width, end) - at, np.int32(plane * bits)
            _restore_part(
                codes, places, at - plane * width, some, shift, mask, steps, least, out, at
            )
            at += some


@jitted
def _restore_part(codes, places, first, some, shift, mask, steps, least, out, at):
    """Channels from `at` on, of one group, whose codes lie in bytes from `first` on."""
    whole = some - some % LANES
    given, made = codes.ctypes.data + first, out.ctypes.data + 4 * at
    for i in range(places.size):
        start, to = given + places[i] * codes.shape[1], made + 4 * i * out.shape[1]
        for k in range(0, whole, LANES):
            _restore_lanes(start + k, shift, mask, steps[i], least[i], to + 4 * k)
        for k in range(whole, some):
            code = (np.int32(codes[places[i], first + k]) >> shift) & mask
            out[i, at + k] = np.float32(code) * steps[i] + least[i]


@jitted
def multiply_codes(turned, side, places, bits, out, at):
    """Products of rows `(rows, dim)`, which are rotated, with a head's vectors at some places, into
    columns of `out` from `at` on; `side` has its codes, scales and zeros."""
    codes, scales, zeros = side
    every, keys = np.arange(RESTORED), np.empty((RESTORED, turned.shape[1]), np.float32)
    for first in range(0, places.size, RESTORED):
        some = places[first : first + RESTORED]
        restore(codes, scales, zeros, some, bits, keys)
        multiply(turned, keys, every[: some.size], out, at + first)


@jitted
def weigh_codes(weights, at, side, places, bits, out):
    """Add a head's vectors at some places, still rotated, by the weights `(rows, entries)`, columns
    from `at` on."""
    codes, scales, zeros = side
    values = np.empty((RESTORED, out.shape[1]), np.float32)
    for first in range(0, places.size, RESTORED):
        some = places[first : first + RESTORED]
        restore(codes, scales, zeros, some, bits, values)
        weigh(weights, at + first, values, some.size, out)


@jitted
def count_of(packed):
    """How many entries of a head are quantized, of `Packed.arrays` or None."""
    return 0 if packed is None else packed[8]


@jitted
def multiply_packed(queries, packed, head, places, bits, out, at):
    """A head's products `(rows, entries)` of queries `(rows, dim)` float32 with its quantized keys
    at some places, into columns of `out` from `at` on; `packed` is `Packed.arrays`."""
    turned, shifts = queries.copy(), np.empty((len(queries), 1), np.float32)
    dot_rows(queries, packed[7], head, shifts, 0)
    for row in range(len(queries)):
        hadamard(turned[row])
    side = packed[0][head], packed[1][head], packed[2][head]
    multiply_codes(turned, side, places, bits, out, at)
    for row in range(len(queries)):
        for i in range(at, at + places.size):
            out[row, i] += shifts[row, 0]


@jitted
def weigh_packed(weights, at, packed, head, bits, out):
    """Add a head's quantized values by their weights, columns from `at` on, to what is 0."""
    side = packed[3][head], packed[4][head], packed[5][head]
    weigh_codes(weights, at, side, np.arange(packed[8]), bits, out)
    for row in range(out.shape[0]):
        hadamard(out[row])
