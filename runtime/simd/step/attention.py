"""Softmax attention of one token to the positions of its sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....formats.kernel import inlined_function, part_function
from .. import vectors as v
from .activations import sigmoid, softplus
from .hadamard import hadamard
from .heads import BLOCK, POSITION, SEQUENCE, row_of

# What `operation` binds: units of the types of keys and values, and how rows consist of them; 1 for
# scores that are capped, for sinks, for gates (2: one of each head; 3 and 4: whose softplus counts,
# not the sigmoid), and for values that were transformed.
key_unit: Any = None
value_unit: Any = None
KEY_HEADER, KEY_BYTES, VALUE_HEADER, VALUE_BYTES = 0, 64, 0, 64
CAPPED, SINKS, GATED, TURNED = 1, 1, 1, 1
# Positions whose keys or values are decoded at a time; the next ones are fetched meanwhile.
PIECE = 16
MOST, TOTAL, SHRINK = BLOCK * 4, BLOCK * 4 + 4, BLOCK * 4 + 8  # after the scores of a head
BUFFER = BLOCK * 4 + 64  # bytes for each head


def attend(arguments, thread, threads):
    """Every head attends on its own, in blocks of positions with a running maximum of the scores.
    Heads of a thread that have the same keys and values decode them once for all.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, bytes from head to
    head; address of the result, bytes from head to head; heads, query heads for each key head;
    units of 32 elements of a key and of a value; bytes of a row of keys and of one of its heads,
    the same for values; the bytes before values in their rows; a buffer of `BUFFER` bytes for each
    head; the factor of scores; softcap, window (0 for none, negative for chunks), sinks; gates,
    bytes from one to the next; block and factor of `hadamard` for values; a buffer for `PIECE` keys
    or values as float32, bytes to that of the next thread.
    """
    q_first, q_step = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    heads, group = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    key_units, value_units = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    key_row, key_head = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    value_row, value_head = v.integer_at(arguments + 96), v.integer_at(arguments + 104)
    skipped = v.integer_at(arguments + 112)
    scale, softcap = v.float_at(arguments + 128), v.float_at(arguments + 136)
    decoded = v.integer_at(arguments + 192) + thread * v.integer_at(arguments + 200)
    start, stop = _positions(arguments)
    head, last = heads * thread // threads, heads * (thread + 1) // threads
    while head < last:
        end = min(last, (head // group + 1) * group)
        for h in range(head, end):
            _begin(arguments, h)
        for block in range(start // BLOCK, (stop + BLOCK - 1) // BLOCK):
            first = max(start, block * BLOCK)
            n = min(stop, (block + 1) * BLOCK) - first
            for piece in range(0, n, PIECE):
                length = min(PIECE, n - piece)
                row, to = _row(arguments, first + piece, 0) + head // group * key_head, decoded
                for _ in range(length):
                    for u in range(key_units):
                        v.prefetch(row + PIECE * key_row + u * KEY_BYTES)
                        low, high = key_unit(row, row + KEY_HEADER + u * KEY_BYTES, 0)
                        v.store_floats(to, low)
                        v.store_floats(to + 64, high)
                        to += 128
                    row += key_row
                for h in range(head, end):
                    scores, q = _buffer(arguments, h) + 4 * piece, q_first + q_step * h
                    for i in range(length):
                        key = decoded + 128 * key_units * i
                        a = v.splat(np.float32(0))
                        b = a
                        for u in range(0, 128 * key_units, 128):
                            a = v.fma(v.load_floats(key + u), v.load_floats(q + u), a)
                            b = v.fma(v.load_floats(key + u + 64), v.load_floats(q + u + 64), b)
                        score = v.total(v.add(a, b)) * scale
                        if CAPPED == 1:
                            score = softcap * np.float32(np.tanh(score / softcap))
                        v.store_float(scores + 4 * i, score)
            for h in range(head, end):
                _to_shares(_buffer(arguments, h), n)
            for piece in range(0, n, PIECE):
                length = min(PIECE, n - piece)
                row, to = _row(arguments, first + piece, 8) + head // group * value_head, decoded
                for _ in range(length):
                    for u in range(value_units):
                        at = row + VALUE_HEADER + skipped + u * VALUE_BYTES
                        v.prefetch(at + PIECE * value_row)
                        low, high = value_unit(row, at, 0)
                        v.store_floats(to, low)
                        v.store_floats(to + 64, high)
                        to += 128
                    row += value_row
                for h in range(head, end):
                    shares, out = _buffer(arguments, h) + 4 * piece, _result(arguments, h)
                    shrink = v.splat(np.float32(1))
                    if piece == 0:
                        shrink = v.splat(v.float_at(_buffer(arguments, h) + SHRINK))
                    for u in range(0, 128 * value_units, 128):
                        a = v.mul(v.load_floats(out + u), shrink)
                        b = v.mul(v.load_floats(out + u + 64), shrink)
                        for i in range(length):
                            value = decoded + 128 * value_units * i + u
                            share = v.splat(v.float_at(shares + 4 * i))
                            a = v.fma(v.load_floats(value), share, a)
                            b = v.fma(v.load_floats(value + 64), share, b)
                        v.store_floats(out + u, a)
                        v.store_floats(out + u + 64, b)
        for h in range(head, end):
            if SINKS == 1:
                _divide_with_sink(arguments, h)
            else:
                _multiply(arguments, h, np.float32(1) / v.float_at(_buffer(arguments, h) + TOTAL))
            if TURNED == 1:
                size = 32 * v.integer_at(arguments + 72)
                block, turn = v.integer_at(arguments + 176), v.float_at(arguments + 184)
                hadamard(_result(arguments, h), size, block, turn)
            if GATED == 1:
                _apply_gates(arguments, h)
            if GATED == 2:
                _apply_gate(arguments, h)
            if GATED == 3:
                _apply_soft_gates(arguments, h)
            if GATED == 4:
                _apply_soft_gate(arguments, h)
        head = end


@part_function
def _positions(arguments):
    """Return the first position that the token sees, and the one after the last."""
    window = v.integer_at(arguments + 144)
    stop = v.integer_at(v.integer_at(arguments) + POSITION) + 1
    if window < 0:
        return (stop - 1) // -window * -window, stop
    return max(0, stop - window) if window else 0, stop


@inlined_function
def _buffer(arguments, head):
    return v.integer_at(arguments + 120) + BUFFER * head


@inlined_function
def _result(arguments, head):
    return v.integer_at(arguments + 32) + v.integer_at(arguments + 40) * head


@part_function
def _row(arguments, position, place):
    """Return the address of the row of a position. place: 0 for keys, 8 for values."""
    layer = v.integer_at(v.integer_at(arguments) + SEQUENCE) + v.integer_at(arguments + 8)
    stride = v.integer_at(arguments + 80 + 2 * place)
    return v.integer_at(layer + place) + row_of(v.integer_at(layer + 16), position) * stride


@part_function
def _begin(arguments, head):
    out = _result(arguments, head)
    for i in range(0, 128 * v.integer_at(arguments + 72), 64):
        v.store_floats(out + i, v.splat(np.float32(0)))
    v.store_float(_buffer(arguments, head) + MOST, np.float32(-np.inf))
    v.store_float(_buffer(arguments, head) + TOTAL, np.float32(0))


@part_function
def _to_shares(scores, n):
    """Make exponentials of the n scores of a head in a block, with the largest so far as 0, and
    store by what earlier results shrink.
    """
    for i in range(n, (n + 15) // 16 * 16):
        v.store_float(scores + 4 * i, np.float32(-np.inf))
    most = v.float_at(scores + MOST)
    highest = most
    for i in range(0, n, 16):
        highest = max(highest, v.highest(v.load_floats(scores + 4 * i)))
    shrink = v.highest(v.exp(v.splat(most - highest)))
    shares = v.splat(np.float32(0))
    for i in range(0, n, 16):
        share = v.exp(v.sub(v.load_floats(scores + 4 * i), v.splat(highest)))
        v.store_floats(scores + 4 * i, share)
        shares = v.add(shares, share)
    v.store_float(scores + TOTAL, v.float_at(scores + TOTAL) * shrink + v.total(shares))
    v.store_float(scores + MOST, highest)
    v.store_float(scores + SHRINK, shrink)


# What is done with the result of a head in the end: parts that most models do not have are not
# compiled for them.


@part_function
def _multiply(arguments, head, factor):
    out = _result(arguments, head)
    for i in range(out, out + 128 * v.integer_at(arguments + 72), 64):
        v.store_floats(i, v.mul(v.load_floats(i), v.splat(factor)))


@part_function
def _divide_with_sink(arguments, head):
    """Divide by the total, to which the sink adds."""
    buffer = _buffer(arguments, head)
    most, total = v.float_at(buffer + MOST), v.float_at(buffer + TOTAL)
    sink = v.float_at(v.integer_at(arguments + 152) + 4 * head)
    highest = max(most, sink)
    shrink = v.highest(v.exp(v.splat(most - highest)))
    share = v.highest(v.exp(v.splat(sink - highest)))
    _multiply(arguments, head, shrink / (total * shrink + share))


@part_function
def _apply_gates(arguments, head):
    out = _result(arguments, head)
    gates = v.integer_at(arguments + 160) + v.integer_at(arguments + 168) * head
    zero, one = v.splat(np.float32(0)), v.splat(np.float32(1))
    for i in range(0, 128 * v.integer_at(arguments + 72), 64):
        gate = v.add(one, v.exp(v.sub(zero, v.load_floats(gates + i))))
        v.store_floats(out + i, v.div(v.load_floats(out + i), gate))


@part_function
def _apply_gate(arguments, head):
    gate = v.integer_at(arguments + 160) + v.integer_at(arguments + 168) * head
    _multiply(arguments, head, v.highest(sigmoid(v.splat(v.float_at(gate)))))


@part_function
def _apply_soft_gates(arguments, head):
    out = _result(arguments, head)
    gates = v.integer_at(arguments + 160) + v.integer_at(arguments + 168) * head
    for i in range(0, 128 * v.integer_at(arguments + 72), 64):
        gate = softplus(v.load_floats(gates + i))
        v.store_floats(out + i, v.mul(v.load_floats(out + i), gate))


@part_function
def _apply_soft_gate(arguments, head):
    gate = v.integer_at(arguments + 160) + v.integer_at(arguments + 168) * head
    _multiply(arguments, head, v.highest(softplus(v.splat(v.float_at(gate)))))
