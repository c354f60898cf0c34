"""Queries, keys and values of one token: norms of heads, rotation, and the cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....formats.kernel import inlined_function, part_function
from .. import vectors as v
from .hadamard import hadamard
from .norms import rms_factor

# What `operation` binds: how vectors are stored in the cache, bytes before their elements (values
# have none), bytes of 16 elements; 1 if queries grow with their positions; 1 if norms follow the
# rotation; 1 if keys (then queries too) or values have a Hadamard transform.
store_key: Any = None
store_value: Any = None
KEY_HEADER, KEY_BYTES, VALUE_BYTES, WARMS = 0, 64, 64, 1
NORMS_LAST, TURNS_KEYS, TURNS_VALUES = 0, 1, 1

# The frame: the position of the token, and the address of what belongs to its sequence.
POSITION, SEQUENCE = 0, 8
# Of each layer in the sequence: address of keys, of values, and of the first rows of blocks.
LAYER_BYTES = 24
BLOCK = 64  # positions


def angles(arguments, thread, threads):
    """Cosines and sines of the rotation at a position. Arguments: the frame, rates float64[pairs],
    pairs, magnitude, address of float32[pairs, 2].
    """
    position = float(v.integer_at(v.integer_at(arguments) + POSITION))
    rates, n = v.integer_at(arguments + 8), v.integer_at(arguments + 16)
    magnitude, out = float(v.float_at(arguments + 24)), v.integer_at(arguments + 32)
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        angle = position * v.double_at(rates + 8 * i)
        v.store_float(out + 8 * i, np.float32(math.cos(angle) * magnitude))
        v.store_float(out + 8 * i + 4, np.float32(math.sin(angle) * magnitude))


@part_function
def rotate(x, table, pairs, step, other):
    """Rotate pairs of elements in place: pair i has an element at byte `step` * i, and one `other`
    bytes after it. table: what `angles` gives.
    """
    for i in range(pairs):
        cos, sin = v.float_at(table + 8 * i), v.float_at(table + 8 * i + 4)
        a, b = v.float_at(x + step * i), v.float_at(x + step * i + other)
        v.store_float(x + step * i, a * cos - b * sin)
        v.store_float(x + step * i + other, a * sin + b * cos)


@part_function
def norm_head(x, n, weights, eps):
    """RMS norm in place."""
    factor = v.splat(rms_factor(x, n, eps))
    for i in range(0, 4 * n, 64):
        normed = v.mul(v.load_floats(x + i), factor)
        v.store_floats(x + i, v.mul(normed, v.load_floats(weights + i)))


@inlined_function
def row_of(table, position):
    """Return the row of the pool's memory that a position has."""
    return v.integer_at(table + 8 * (position // BLOCK)) + position % BLOCK


@inlined_function
def warm(x, n, scale, original, position):
    """Multiply a query by 1 + scale * ln(1 + position // original context), in place. position:
    with the offset of `Temperature`.
    """
    factor = 1 + scale * np.float32(math.log1p(position // original))
    for i in range(0, 4 * n, 64):
        v.store_floats(x + i, v.mul(v.load_floats(x + i), v.splat(np.float32(factor))))


def rotate_and_keep(arguments, thread, threads):
    """Norm and rotate query and key heads in place, and write keys and values to the cache.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, its heads, bytes
    from head to head; k, v, their heads; elements of a query and of a value; norms of queries and
    of keys or 0, eps of both; angles, pairs, `step` and `other` of `rotate`; `scale` and `original`
    of `warm`; block and factor of `hadamard` for keys, the same for values; the offset of positions
    for `warm`.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    q, heads, q_step = (
        v.integer_at(arguments + 16),
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
    )
    keys, values, kv_heads = (
        v.integer_at(arguments + 40),
        v.integer_at(arguments + 48),
        v.integer_at(arguments + 56),
    )
    n_key, n_value = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    q_norm, k_norm = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    q_eps, k_eps = v.float_at(arguments + 96), v.float_at(arguments + 104)
    table, pairs = v.integer_at(arguments + 112), v.integer_at(arguments + 120)
    step, other = v.integer_at(arguments + 128), v.integer_at(arguments + 136)
    scale, original = v.float_at(arguments + 144), v.integer_at(arguments + 152)
    key_block, key_factor = v.integer_at(arguments + 160), v.float_at(arguments + 168)
    value_block, value_factor = v.integer_at(arguments + 176), v.float_at(arguments + 184)
    position = v.integer_at(frame + POSITION)
    row = row_of(v.integer_at(layer + 16), position)
    all_heads = heads + kv_heads
    for i in range(all_heads * thread // threads, all_heads * (thread + 1) // threads):
        head = i - heads
        is_key = head >= 0
        x = keys + 4 * n_key * head if is_key else q + q_step * i
        norm, eps = (k_norm, k_eps) if is_key else (q_norm, q_eps)
        if NORMS_LAST == 0 and norm:
            norm_head(x, n_key, norm, eps)
        rotate(x, table, pairs, step, other)
        if NORMS_LAST == 1 and norm:
            norm_head(x, n_key, norm, eps)
        if WARMS == 1 and not is_key:
            warm(x, n_key, scale, original, position + v.integer_at(arguments + 192))
        if TURNS_KEYS == 1:
            hadamard(x, n_key, key_block, key_factor)
        if is_key:
            to = (row * kv_heads + head) * (KEY_HEADER + n_key // 16 * KEY_BYTES)
            to += v.integer_at(layer)
            store_key(to, x, n_key)
            to = v.integer_at(layer + 8) + (row * kv_heads + head) * (n_value // 16 * VALUE_BYTES)
            x = values + 4 * n_value * head
            if TURNS_VALUES == 1:
                hadamard(x, n_value, value_block, value_factor)
            store_value(to, x, n_value)


def store_f32(to, x, n):
    """Store n float32 at address x as F32 in a row at address `to`. n: a multiple of 16."""
    for i in range(0, n, 16):
        v.store_floats(to + 4 * i, v.load_floats(x + 4 * i))


def store_f16(to, x, n):
    """Store n float32 at address x as F16 in a row at address `to`. n: a multiple of 16."""
    for i in range(0, n, 16):
        v.store_halves(to + 2 * i, v.load_floats(x + 4 * i))


def store_bf16(to, x, n):
    """Store n float32 at address x as BF16 in a row at address `to`. n: a multiple of 16."""
    for i in range(0, n, 16):
        v.store_bf16(to + 2 * i, v.load_floats(x + 4 * i))
