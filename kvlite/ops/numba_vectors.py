"""Vectors on a CPU, compiled by numba: rotated, multiplied and weighed."""

import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlite.ops.numba_jit import Loop, jitted
from kvlite.ops.numba_llvm import write_fetch


@jitted
def _sums_and_differences(of, out):
    half = out.size // 2
    sums, differences = out[:half], out[half:]
    for i in range(half):
        one, other = of[2 * i], of[2 * i + 1]
        sums[i], differences[i] = one + other, one - other


@jitted
def hadamard(vector):
    """Rotate a vector in place, as `kvlite.cache.quantization.hadamard.rotation` does."""
    size = vector.size & -vector.size
    share, spare = np.float32(1 / np.sqrt(np.float32(size))), np.empty(size, np.float32)
    for start in range(0, vector.size, size):
        part, done = vector[start : start + size], 1
        one, other = part, spare
        while done < size:
            _sums_and_differences(one, other)
            one, other, done = other, one, 2 * done
        for i in range(size):
            part[i] = one[i] * share


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


@jitted
def multiply(queries, keys, places, out, at):
    """A head's products `(rows, entries)` with keys at some places, into columns from `at` on."""
    whole = places.size - places.size % 4
    for i in range(0, whole, 4):
        one, two = keys[places[i]], keys[places[i + 1]]
        three, four = keys[places[i + 2]], keys[places[i + 3]]
        for row in range(queries.shape[0]):
            query, line = queries[row], out[row]
            a = b = c = d = np.float32(0)
            for j in range(query.size):
                a += query[j] * one[j]
                b += query[j] * two[j]
                c += query[j] * three[j]
                d += query[j] * four[j]
            line[at + i], line[at + i + 1], line[at + i + 2], line[at + i + 3] = a, b, c, d
    for i in range(whole, places.size):
        dot_rows(queries, keys, places[i], out, at + i)


@jitted
def weigh(weights, at, values, count, out):
    """Add a head's first `count` values by the weights of its rows, `(rows, entries)`, columns from
    `at` on."""
    whole = count - count % 4
    for i in range(0, whole, 4):
        one, two, three, four = values[i], values[i + 1], values[i + 2], values[i + 3]
        for row in range(out.shape[0]):
            line, k = out[row], at + i
            a, b = weights[row, k], weights[row, k + 1]
            c, d = weights[row, k + 2], weights[row, k + 3]
            for j in range(line.size):
                line[j] += a * one[j] + b * two[j] + c * three[j] + d * four[j]
    for i in range(whole, count):
        for row in range(out.shape[0]):
            for j in range(out.shape[1]):
                out[row, j] += weights[row, at + i] * values[i, j]


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
