"""Latent attention of one token: its queries, and its row of the cache."""

from __future__ import annotations

from typing import Any

from .. import vectors as v
from .activations import sigmoid
from .hadamard import hadamard
from .heads import POSITION, SEQUENCE, norm_head, rotate, row_of, warm

# What `operation` binds, as for `heads`.
store_key: Any = None
KEY_HEADER, KEY_BYTES, TURNS = 0, 64, 1


def rotate_and_keep_latent(arguments, thread, threads):
    """Rotate the last elements of queries to the front of their places among absorbed queries; norm
    the latent vector and write [rotated key | latent vector] to the cache.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, heads, elements
    from head to head, those before the rotated ones; absorbed queries, elements from head to head;
    the result of the projection [latent vector | key], elements of both; a buffer for as many; norm
    of the latent vector, its eps; angles, pairs, `step` and `other` of `rotate`; `scale` and
    `original` of `warm`, 0 for none; block and factor of `hadamard` for rows of the cache.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    q, heads = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    q_step, nope = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    absorbed, absorbed_step = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    latent, rank = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    rotated, row = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    weights, eps = v.integer_at(arguments + 96), v.float_at(arguments + 104)
    table, pairs = v.integer_at(arguments + 112), v.integer_at(arguments + 120)
    step, other = v.integer_at(arguments + 128), v.integer_at(arguments + 136)
    scale, original = v.float_at(arguments + 144), v.integer_at(arguments + 152)
    position = v.integer_at(frame + POSITION)
    n = heads + 1
    for head in range(n * thread // threads, n * (thread + 1) // threads):
        if head < heads:
            to, at = absorbed + 4 * absorbed_step * head, q + 4 * (q_step * head + nope)
        else:
            to, at = row, latent + 4 * rank
        for i in range(0, 4 * rotated, 64):
            v.store_floats(to + i, v.load_floats(at + i))
        rotate(to, table, pairs, step, other)
        if head < heads and original:
            warm(to, rotated, scale, original, position)
            warm(q + 4 * q_step * head, nope, scale, original, position)
        if head == heads:
            norm_head(latent, rank, weights, eps)
            for i in range(0, 4 * rank, 64):
                v.store_floats(row + 4 * rotated + i, v.load_floats(latent + i))
            number = row_of(v.integer_at(layer + 16), position)
            elements = rotated + rank
            to = v.integer_at(layer) + number * (KEY_HEADER + elements // 16 * KEY_BYTES)
            if TURNS == 1:
                block, factor = v.integer_at(arguments + 160), v.float_at(arguments + 168)
                hadamard(row, elements, block, factor)
            store_key(to, row, elements)


def gate_heads(arguments, thread, threads):
    """Multiply the results of every head by the sigmoid of its gate.

    Arguments: results, heads, their elements; gates.
    """
    results, heads = v.integer_at(arguments), v.integer_at(arguments + 8)
    n, gates = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    for head in range(heads * thread // threads, heads * (thread + 1) // threads):
        gate = sigmoid(v.splat(v.float_at(gates + 4 * head)))
        for at in range(4 * n * head, 4 * n * (head + 1), 64):
            v.store_floats(results + at, v.mul(v.load_floats(results + at), gate))
