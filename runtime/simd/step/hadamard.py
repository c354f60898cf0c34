"""The Walsh-Hadamard transform of vectors in memory: bit for bit what `state.hadamard` gives."""

from __future__ import annotations

from ....formats.kernel import inlined_function
from .. import vectors as v


@inlined_function
def hadamard(x, n, block, factor):
    """Transform n float32 at address x in place, in blocks of so many elements, a multiple of 16.
    factor: block^-1/2.
    """
    size, scale = 4 * block, v.splat(factor)
    for first in range(x, x + 4 * n, size):
        for i in range(first, first + size, 64):
            v.store_floats(i, v.butterflies(v.load_floats(i)))
        distance = 64
        while distance < size:
            for i in range(first, first + size, 2 * distance):
                for j in range(i, i + distance, 64):
                    a, b = v.load_floats(j), v.load_floats(j + distance)
                    v.store_floats(j, v.add(a, b))
                    v.store_floats(j + distance, v.sub(a, b))
            distance *= 2
        for i in range(first, first + size, 64):
            v.store_floats(i, v.mul(v.load_floats(i), scale))


def transform(arguments, thread, threads):
    """Transform vectors in place. Arguments: the first, elements of one, vectors, the block, and
    the factor of `hadamard`.
    """
    x, n, vectors = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    block, factor = v.integer_at(arguments + 24), v.float_at(arguments + 32)
    for i in range(vectors * thread // threads, vectors * (thread + 1) // threads):
        hadamard(x + 4 * n * i, n, block, factor)
