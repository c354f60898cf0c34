"""The choice of experts, and the sum of what they give."""

from __future__ import annotations

import math

import numpy as np

from ....formats.kernel import inlined_function, part_function
from .. import vectors as v
from ..operations import operation
from .activations import sigmoid

SOFTMAX, SIGMOID, SELECTED, SQRT_SOFTPLUS, SPARSE_MIXER = range(5)
_SCORES = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "selected": SELECTED,
    "sqrt_softplus": SQRT_SOFTPLUS,
    "sparse_mixer": SPARSE_MIXER,
}

_NEAR = np.float32(0.02)  # as in the description of a router

# What `operation` binds for `route`: the kind of score, and 1 if experts are in groups. What others
# need is not compiled.
SCORE, GROUPED = SOFTMAX, 1


@inlined_function
def _softmax(x, n):
    """In place."""
    most, total = v.float_at(x), np.float32(0)
    for i in range(1, n):
        most = max(most, v.float_at(x + 4 * i))
    for i in range(n):
        share = np.float32(math.exp(v.float_at(x + 4 * i) - most))
        v.store_float(x + 4 * i, share)
        total += share
    for i in range(n):
        v.store_float(x + 4 * i, v.float_at(x + 4 * i) / total)


@inlined_function
def _mix(logits, n, chosen, used, weights):
    """The weights of `sparse_mixer` for chosen experts."""
    for slot in range(used):
        most, total = v.float_at(logits + 4 * v.integer_at(chosen + 8 * slot)), np.float32(0)
        for i in range(n):
            x, left = v.float_at(logits + 4 * i), True
            for other in range(slot):
                left &= v.integer_at(chosen + 8 * other) != i
            if left and not most - x > _NEAR * max(abs(x), most):
                total += np.float32(math.exp(x - most))
        v.store_float(weights + 4 * slot, np.float32(1) / total)


@part_function
def _keep_best_groups(choice, n, groups, used, best):
    """Make the choice -inf for experts of all but the best groups; the first among equals. A group
    is as good as the sum of its `best` best experts. `choice` has room for groups after the n
    experts, and for a mark of each expert after these.
    """
    size, sums, marks = n // groups, choice + 4 * n, choice + 4 * (n + groups)
    for i in range(n):
        v.store_float(marks + 4 * i, np.float32(0))
    for group in range(groups):
        total = np.float32(0)
        for _ in range(min(best, size)):
            at = -1
            for i in range(group * size, (group + 1) * size):
                if v.float_at(marks + 4 * i) == 0 and (
                    at < 0 or v.float_at(choice + 4 * i) > v.float_at(choice + 4 * at)
                ):
                    at = i
            v.store_float(marks + 4 * at, np.float32(1))
            total += v.float_at(choice + 4 * at)
        v.store_float(sums + 4 * group, total)
    for i in range(groups):
        before = 0  # groups that are better
        for j in range(groups):
            a, b = v.float_at(sums + 4 * j), v.float_at(sums + 4 * i)
            before += a > b or (a == b and j < i)
        if before >= used:
            for e in range(i * size, (i + 1) * size):
                v.store_float(choice + 4 * e, np.float32(-np.inf))


def route(arguments, thread, threads):
    """Choose experts from the logits: of one row, every thread for itself, or of many rows, which
    the threads share.

    Arguments: logits; biases of the choice or 0; experts, chosen ones; groups, those used, experts
    that count in a group; whether weights are divided by their sum; their factor; the numbers of
    the chosen experts int64, their weights float32, a buffer of 3 floats for each expert, bytes to
    the memory of the next thread for these three together; K and t of smart expert reduction: of
    the experts after the K best, those with no more than t times the first weight get the number -1
    and the weight 0; 0, or the number of many rows, whose logits, numbers and weights follow each
    other. Of many rows, only the buffer is that of a thread.
    """
    logits, biases = v.integer_at(arguments), v.integer_at(arguments + 8)
    n, used = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    groups, groups_used = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    group_best, norm = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    factor, own = v.float_at(arguments + 64), thread * v.integer_at(arguments + 96)
    scores, rows = v.integer_at(arguments + 88) + own, v.integer_at(arguments + 120)
    least, threshold = v.integer_at(arguments + 104), v.float_at(arguments + 112)
    chosen, weights = v.integer_at(arguments + 72), v.integer_at(arguments + 80)
    first, end = 0, 1
    if rows:
        first, end = rows * thread // threads, rows * (thread + 1) // threads
        logits, chosen, weights = (
            logits + 4 * n * first,
            chosen + 8 * used * first,
            weights + 4 * used * first,
        )
    else:
        chosen, weights = chosen + own, weights + own
    choice = scores + 4 * n
    for _ in range(first, end):
        for i in range(n):
            x = v.float_at(logits + 4 * i)
            if SCORE == SIGMOID:
                x = np.float32(1) / (np.float32(1) + np.float32(math.exp(-x)))
            if SCORE == SQRT_SOFTPLUS:
                x = np.float32(math.sqrt(max(x, np.float32(0)) + math.log1p(math.exp(-abs(x)))))
            v.store_float(scores + 4 * i, x)
        if SCORE == SOFTMAX:
            _softmax(scores, n)
        for i in range(n):
            bias = v.float_at(biases + 4 * i) if biases else np.float32(0)
            v.store_float(choice + 4 * i, v.float_at(scores + 4 * i) + bias)
        if GROUPED == 1:
            _keep_best_groups(choice, n, groups, groups_used, group_best)
        total = np.float32(0)
        for slot in range(used):
            best = -1
            for i in range(n):
                if best < 0 or v.float_at(choice + 4 * i) > v.float_at(choice + 4 * best):
                    taken = False
                    for other in range(slot):  # few experts come this far
                        taken |= v.integer_at(chosen + 8 * other) == i
                    if not taken:
                        best = i
            v.store_integer(chosen + 8 * slot, best)
            v.store_float(weights + 4 * slot, v.float_at(scores + 4 * best))
        if SCORE == SELECTED:
            _softmax(weights, used)
        if SCORE == SPARSE_MIXER:
            _mix(scores, n, chosen, used, weights)
        limit = threshold * v.float_at(weights)
        for slot in range(least, used):
            if not v.float_at(weights + 4 * slot) > limit:
                v.store_float(weights + 4 * slot, np.float32(0))
                v.store_integer(chosen + 8 * slot, -1)
        if norm:
            for slot in range(used):
                total += v.float_at(weights + 4 * slot)
            for slot in range(used):
                v.store_float(weights + 4 * slot, v.float_at(weights + 4 * slot) / total)
        for slot in range(used):
            v.store_float(weights + 4 * slot, v.float_at(weights + 4 * slot) * factor)
        logits, chosen, weights = logits + 4 * n, chosen + 8 * used, weights + 4 * used


def weigh_input(arguments, thread, threads):
    """Multiply what the only expert of a token reads by its weight, which becomes 1. Arguments: x,
    elements, address of the result; the weight, bytes to that of the next thread.
    """
    x, n = v.integer_at(arguments), v.integer_at(arguments + 8) // 16
    out = v.integer_at(arguments + 16)
    at = v.integer_at(arguments + 24) + thread * v.integer_at(arguments + 32)
    weight = v.splat(v.float_at(at))
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        v.store_floats(out + 64 * i, v.mul(v.load_floats(x + 64 * i), weight))
    v.store_float(at, np.float32(1))


def combine(arguments, thread, threads):
    """The weighted sum of the results of experts; those of weight 0 are not read. Arguments:
    results, bytes to those of the next expert, experts; their weights, bytes to those of the next
    thread; the result of the shared expert or 0, the number whose sigmoid multiplies it or 0;
    elements; address of the sum.
    """
    slots, step, used = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    weights = v.integer_at(arguments + 24) + thread * v.integer_at(arguments + 32)
    shared, gate = v.integer_at(arguments + 40), v.integer_at(arguments + 48)
    n, out = v.integer_at(arguments + 56) // 16, v.integer_at(arguments + 64)
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        total = v.splat(np.float32(0))
        for slot in range(used):
            weight = v.float_at(weights + 4 * slot)
            if weight != 0:
                part = v.load_floats(slots + slot * step + 64 * i)
                total = v.add(total, v.mul(part, v.splat(weight)))
        if shared:
            always = v.load_floats(shared + 64 * i)
            if gate:
                always = v.mul(always, sigmoid(v.splat(v.float_at(gate))))
            total = v.add(total, always)
        v.store_floats(out + 64 * i, total)


def routing(score: str, grouped: bool) -> int:
    """Return the operation `route` for a score of `RouterSpec`. grouped: experts are in groups."""
    name = f"route_{score}" + ("_groups" if grouped else "")
    return operation(route, name, SCORE=_SCORES[score], GROUPED=int(grouped))
