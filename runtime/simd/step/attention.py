"""Softmax attention of one token to the positions of its sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import vectors as v
from .hadamard import hadamard
from .heads import BLOCK, POSITION, SEQUENCE

# What `operation` binds: units of the types of keys and values, and how rows consist of them; 1 for
# scores that are capped, for sinks, for gates, and for values that were transformed.
key_unit: Any = None
value_unit: Any = None
KEY_HEADER, KEY_BYTES, VALUE_HEADER, VALUE_BYTES = 0, 64, 0, 64
CAPPED, SINKS, GATED, TURNED = 1, 1, 1, 1
BUFFER = BLOCK * 4  # bytes for each head


def attend(arguments, thread, threads):
    """Every head attends on its own, in blocks of positions with a running maximum of the scores.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, bytes from head to
    head; address of the result, bytes from head to head; heads, query heads for each key head;
    units of 32 elements of a key and of a value; bytes of a row of keys and of one of its heads,
    the same for values; the bytes before values in their rows; a buffer of `BUFFER` bytes for each
    head; the factor of scores; softcap, window (0 for none), sinks; gates, bytes from one to the
    next; block and factor of `hadamard` for values.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    q_first, q_step = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    out_first, out_step = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    heads, group = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    key_units, value_units = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    key_row, key_head = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    value_row, value_head = v.integer_at(arguments + 96), v.integer_at(arguments + 104)
    skipped, buffers = v.integer_at(arguments + 112), v.integer_at(arguments + 120)
    scale, softcap = v.float_at(arguments + 128), v.float_at(arguments + 136)
    window, sinks = v.integer_at(arguments + 144), v.integer_at(arguments + 152)
    gates, gate_step = v.integer_at(arguments + 160), v.integer_at(arguments + 168)
    block_of_values, value_factor = v.integer_at(arguments + 176), v.float_at(arguments + 184)
    keys, values = v.integer_at(layer), v.integer_at(layer + 8)
    table, stop = v.integer_at(layer + 16), v.integer_at(frame + POSITION) + 1
    start = max(0, stop - window) if window else 0
    zero, one = v.splat(np.float32(0)), v.splat(np.float32(1))
    for head in range(heads * thread // threads, heads * (thread + 1) // threads):
        q, out = q_first + q_step * head, out_first + out_step * head
        scores = buffers + BUFFER * head
        key_of_head = keys + head // group * key_head
        value_of_head = values + head // group * value_head
        for u in range(value_units):
            v.store_floats(out + 128 * u, zero)
            v.store_floats(out + 128 * u + 64, zero)
        most, total = np.float32(-np.inf), np.float32(0)
        for block in range(start // BLOCK, (stop + BLOCK - 1) // BLOCK):
            first = max(start, block * BLOCK)
            n = min(stop, (block + 1) * BLOCK) - first
            base = v.integer_at(table + 8 * block) + first - block * BLOCK
            for i in range(n, (n + 15) // 16 * 16):
                v.store_float(scores + 4 * i, np.float32(-np.inf))
            for i in range(n):
                row = key_of_head + (base + i) * key_row
                a, b = zero, zero
                for u in range(key_units):
                    low, high = key_unit(row, row + KEY_HEADER + u * KEY_BYTES, 0)
                    a = v.fma(low, v.load_floats(q + 128 * u), a)
                    b = v.fma(high, v.load_floats(q + 128 * u + 64), b)
                score = v.total(v.add(a, b)) * scale
                if CAPPED == 1:
                    score = softcap * np.float32(np.tanh(score / softcap))
                v.store_float(scores + 4 * i, score)
            highest = most
            for i in range(0, n, 16):
                highest = max(highest, v.highest(v.load_floats(scores + 4 * i)))
            shrink = v.exp(v.splat(most - highest))
            shares = zero
            for i in range(0, n, 16):
                share = v.exp(v.sub(v.load_floats(scores + 4 * i), v.splat(highest)))
                v.store_floats(scores + 4 * i, share)
                shares = v.add(shares, share)
            total = total * v.highest(shrink) + v.total(shares)
            most = highest
            for u in range(value_units):
                a = v.mul(v.load_floats(out + 128 * u), shrink)
                b = v.mul(v.load_floats(out + 128 * u + 64), shrink)
                for i in range(n):
                    row = value_of_head + (base + i) * value_row
                    at = row + VALUE_HEADER + skipped + u * VALUE_BYTES
                    low, high = value_unit(row, at, 0)
                    share = v.splat(v.float_at(scores + 4 * i))
                    a, b = v.fma(low, share, a), v.fma(high, share, b)
                v.store_floats(out + 128 * u, a)
                v.store_floats(out + 128 * u + 64, b)
        if SINKS == 1:
            sink = v.float_at(sinks + 4 * head)
            highest = max(most, sink)
            total = total * v.highest(v.exp(v.splat(most - highest)))
            share = v.highest(v.exp(v.splat(sink - highest)))
            factor = v.highest(v.exp(v.splat(most - highest))) / (total + share)
        else:
            factor = np.float32(1) / total
        for i in range(0, 128 * value_units, 64):
            v.store_floats(out + i, v.mul(v.load_floats(out + i), v.splat(factor)))
        if TURNED == 1:
            hadamard(out, 32 * value_units, block_of_values, value_factor)
        if GATED == 1:
            for i in range(0, 128 * value_units, 64):
                gate = v.load_floats(gates + gate_step * head + i)
                gate = v.add(one, v.exp(v.sub(zero, gate)))
                v.store_floats(out + i, v.div(v.load_floats(out + i), gate))
