"""The hidden state, and norms over it."""

from __future__ import annotations

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v


@inlined_function
def mean_square(x, n):
    """Return the mean of the squares of n numbers."""
    a = v.splat(np.float32(0))
    for i in range(0, 4 * n, 64):
        part = v.load_floats(x + i)
        a = v.fma(part, part, a)
    return v.total(a) / np.float32(n)


@inlined_function
def inverse_root(x):
    """Return 1 / sqrt(x) of one float32."""
    return np.float32(1) / np.sqrt(x)


@inlined_function
def rms_factor(x, n, eps):
    """Return what n numbers are multiplied by in their RMS norm."""
    return inverse_root(mean_square(x, n) + eps)


@inlined_function
def center(x, n, out):
    """Write n numbers less their mean to `out`, which may be where they are. Return `out`."""
    a = v.splat(np.float32(0))
    for i in range(0, 4 * n, 64):
        a = v.add(a, v.load_floats(x + i))
    mean = v.splat(v.total(a) / np.float32(n))
    for i in range(0, 4 * n, 64):
        v.store_floats(out + i, v.sub(v.load_floats(x + i), mean))
    return out


@inlined_function
def add(arguments, thread):
    """Add to the hidden state of this thread, or begin it. Return its address.

    Arguments: h, bytes to that of the next thread, delta or 0, elements, whether delta times a
    factor is the first state, the factor, weights of the norm of delta or 0, their eps.
    """
    h = v.integer_at(arguments) + thread * v.integer_at(arguments + 8)
    delta, n = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    post = v.integer_at(arguments + 48)
    factor = v.splat(v.float_at(arguments + 40))
    if v.integer_at(arguments + 32):
        for i in range(0, 4 * n, 64):
            v.store_floats(h + i, v.mul(v.load_floats(delta + i), factor))
    elif post:
        factor = v.splat(rms_factor(delta, n, v.float_at(arguments + 56)))
        for i in range(0, 4 * n, 64):
            normed = v.mul(v.mul(v.load_floats(delta + i), factor), v.load_floats(post + i))
            v.store_floats(h + i, v.add(v.load_floats(h + i), normed))
    elif delta:
        for i in range(0, 4 * n, 64):
            v.store_floats(h + i, v.add(v.load_floats(h + i), v.load_floats(delta + i)))
    return h


def add_and_rms_norm(arguments, thread, threads):
    """Every thread: add to its hidden state, and norm it. Arguments: those of `add`; address of the
    result, bytes to that of the next thread, weights (0: no norm), eps.
    """
    h, n = add(arguments, thread), v.integer_at(arguments + 24)
    out = v.integer_at(arguments + 64) + thread * v.integer_at(arguments + 72)
    weights = v.integer_at(arguments + 80)
    if weights:
        factor = v.splat(rms_factor(h, n, v.float_at(arguments + 88)))
        for i in range(0, 4 * n, 64):
            normed = v.mul(v.load_floats(h + i), factor)
            v.store_floats(out + i, v.mul(normed, v.load_floats(weights + i)))


def add_and_layer_norm(arguments, thread, threads):
    """As `add_and_rms_norm`, with a LayerNorm. One more argument: its biases or 0."""
    h, n = add(arguments, thread), v.integer_at(arguments + 24)
    out = v.integer_at(arguments + 64) + thread * v.integer_at(arguments + 72)
    weights, biases = v.integer_at(arguments + 80), v.integer_at(arguments + 96)
    factor = v.splat(rms_factor(center(h, n, out), n, v.float_at(arguments + 88)))
    for i in range(0, 4 * n, 64):
        normed = v.mul(v.mul(v.load_floats(out + i), factor), v.load_floats(weights + i))
        if biases:
            normed = v.add(normed, v.load_floats(biases + i))
        v.store_floats(out + i, normed)


def rms_norm(arguments, thread, threads):
    """Every thread: norm of a vector. Arguments: address of the vector, elements, address of the
    result, bytes to that of the next thread, weights, eps.
    """
    x, n = v.integer_at(arguments), v.integer_at(arguments + 8)
    out = v.integer_at(arguments + 16) + thread * v.integer_at(arguments + 24)
    weights = v.integer_at(arguments + 32)
    factor = v.splat(rms_factor(x, n, v.float_at(arguments + 40)))
    for i in range(0, 4 * n, 64):
        normed = v.mul(v.load_floats(x + i), factor)
        v.store_floats(out + i, v.mul(normed, v.load_floats(weights + i)))


def rms_norm_together(arguments, thread, threads):
    """Norm of a vector, of which every thread computes a part. Arguments: address of the vector,
    elements, address of the result, which is another one, weights, eps.
    """
    x, n, out = v.integer_at(arguments), v.integer_at(arguments + 8), v.integer_at(arguments + 16)
    weights, units = v.integer_at(arguments + 24), n // 16
    factor = v.splat(rms_factor(x, n, v.float_at(arguments + 32)))
    for i in range(64 * (units * thread // threads), 64 * (units * (thread + 1) // threads), 64):
        normed = v.mul(v.load_floats(x + i), factor)
        v.store_floats(out + i, v.mul(normed, v.load_floats(weights + i)))


def head_layer_norms(arguments, thread, threads):
    """LayerNorms of heads, in place, each with weights of its own. Arguments: address, heads,
    elements of a head, weights, eps.
    """
    x, heads, n = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    weights, eps = v.integer_at(arguments + 24), v.float_at(arguments + 32)
    for head in range(thread, heads, threads):
        at, by = x + 4 * n * head, weights + 4 * n * head
        factor = v.splat(rms_factor(center(at, n, at), n, eps))
        for i in range(0, 4 * n, 64):
            normed = v.mul(v.load_floats(at + i), factor)
            v.store_floats(at + i, v.mul(normed, v.load_floats(by + i)))


def cap(arguments, thread, threads):
    """limit * tanh(x / limit), in place. Arguments: address, elements, limit."""
    x, n = v.integer_at(arguments), v.integer_at(arguments + 8)
    limit = v.float_at(arguments + 16)
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        v.store_float(x + 4 * i, limit * np.float32(np.tanh(v.float_at(x + 4 * i) / limit)))
