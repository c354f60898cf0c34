"""Rows of many tokens grouped by expert, and the sums of what experts give."""

from __future__ import annotations

import numpy as np

from .. import vectors as v
from ..operations import operation
from ..step.activations import sigmoid


def group_slots(arguments, thread, threads):
    """The first thread alone: group slots by expert, in their order.

    Arguments: experts of the slots int64[n], n, slots of a row, first expert, number of experts,
    address of weights float32[n] or 0; places of the slots among the grouped ones int64[n], rows of
    the grouped ones int64[n], slots of each expert int64[experts], memory for as many. Slots of
    other experts, and those whose weight is there and not positive, have the place -1.
    """
    chosen, n = v.integer_at(arguments), v.integer_at(arguments + 8)
    slots, first = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    experts, weights = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    places, rows = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    counts, ends = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    if thread == 0:
        for e in range(experts):
            v.store_integer(counts + 8 * e, 0)
        for i in range(n):
            e = v.integer_at(chosen + 8 * i) - first
            here = 0 <= e < experts
            if weights:
                here = here and v.float_at(weights + 4 * i) > 0
            v.store_integer(places + 8 * i, e if here else -1)
            if here:
                v.store_integer(counts + 8 * e, v.integer_at(counts + 8 * e) + 1)
        end = 0
        for e in range(experts):
            v.store_integer(ends + 8 * e, end)
            end += v.integer_at(counts + 8 * e)
        for i in range(n):
            e = v.integer_at(places + 8 * i)
            if e >= 0:
                place = v.integer_at(ends + 8 * e)
                v.store_integer(ends + 8 * e, place + 1)
                v.store_integer(places + 8 * i, place)
                v.store_integer(rows + 8 * place, i // slots)


def combine_rows(arguments, thread, threads):
    """Weighted sums of rows, in order of their slots. Arguments: address of the rows, elements of
    each, address of the number of the row in each slot int64[n, slots], negative where there is
    none, and of its weight float32[n, slots], n, slots; rows float32[n, elements] that are added or
    0, numbers float32[n] whose sigmoid multiplies these before or 0; address of the sums
    float32[n, elements].
    """
    rows, size = v.integer_at(arguments), 4 * v.integer_at(arguments + 8)
    numbers, weights = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    n, slots = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    shared, gates = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    out, zero = v.integer_at(arguments + 64), v.splat(np.float32(0))
    for r in range(n * thread // threads, n * (thread + 1) // threads):
        gate = v.splat(np.float32(1))
        if gates:
            gate = sigmoid(v.splat(v.float_at(gates + 4 * r)))
        for i in range(0, size, 64):
            total = zero
            for slot in range(r * slots, (r + 1) * slots):
                number = v.integer_at(numbers + 8 * slot)
                if number >= 0:
                    weight = v.splat(v.float_at(weights + 4 * slot))
                    found = v.mul(weight, v.load_floats(rows + number * size + i))
                    total = v.add(total, found)
            if shared:
                total = v.add(total, v.mul(v.load_floats(shared + r * size + i), gate))
            v.store_floats(out + r * size + i, total)


def grouping() -> int:
    """Return the operation `group_slots`."""
    return operation(group_slots)


def combination() -> int:
    """Return the operation `combine_rows`."""
    return operation(combine_rows)
