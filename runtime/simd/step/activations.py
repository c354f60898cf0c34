"""Activations of feed-forward layers, 16 elements at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v

# What `operation` binds. CAPPED: 1 to limit activation(gate) instead of the gate.
activation: Any = None
CAPPED = 0

_OAI_SLOPE = np.float32(1.702)
_GELU_A, _GELU_B = np.float32(0.7978845608028654), np.float32(0.044715)


@inlined_function
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of 16 float32."""
    one = v.splat(np.float32(1))
    return v.div(one, v.add(one, v.exp(v.sub(v.splat(np.float32(0)), x))))


# ln(1 + t) = 2 artanh(t / (2 + t)): factors of its series, after the first one, 1 / 15. What comes
# before that is less than a unit in the last place for t up to 1.
_ARTANH = tuple(np.float32(1 / n) for n in (13, 11, 9, 7, 5, 3, 1))


@inlined_function
def softplus(x):
    """Return ln(1 + exp(x)) = max(0, x) + ln(1 + exp(-|x|)) of 16 float32."""
    zero, two = v.splat(np.float32(0)), v.splat(np.float32(2))
    t = v.exp(v.sub(zero, v.magnitude(x)))
    s = v.div(t, v.add(two, t))
    square, series = v.mul(s, s), v.splat(np.float32(1 / 15))
    for i in range(7):
        series = v.fma(series, square, v.splat(_ARTANH[i]))
    return v.fma(v.mul(two, s), series, v.largest(zero, x))


def silu(x):
    """Return x / (1 + exp(-x)) of 16 float32."""
    one = v.splat(np.float32(1))
    return v.div(x, v.add(one, v.exp(v.sub(v.splat(np.float32(0)), x))))


def gelu(x):
    """The tanh form: 1 + tanh(y) = 2 sigmoid(2 y)."""
    cube = v.mul(v.mul(x, x), v.mul(x, v.splat(_GELU_B)))
    y = v.mul(v.add(x, cube), v.splat(np.float32(2) * _GELU_A))
    return v.mul(x, sigmoid(y))


def relu_squared(x):
    """Return max(0, x)^2 of 16 float32."""
    x = v.largest(v.splat(np.float32(0)), x)
    return v.mul(x, x)


def swiglu_oai(x):
    """Return x * sigmoid(_OAI_SLOPE * x) of 16 float32, the gate of gpt-oss."""
    return v.mul(x, sigmoid(v.mul(x, v.splat(_OAI_SLOPE))))


def activate(arguments, thread, threads):
    """activation(gate) * (up + shift) of the rows of one or more experts, or activation(gate).

    Arguments: gate, bytes to that of the next expert; up or 0, bytes to that of the next expert;
    address of the result, bytes to that of the next expert; elements of one expert, experts; limit
    or 0, shift. With a limit the gate, or its activation, is at most the limit, and up within the
    limit of 0.
    """
    gates, gate_step = v.integer_at(arguments), v.integer_at(arguments + 8)
    ups, up_step = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    outs, out_step = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    chunks, experts = v.integer_at(arguments + 48) // 16, v.integer_at(arguments + 56)
    limit, shift = v.float_at(arguments + 64), v.splat(v.float_at(arguments + 72))
    n = chunks * experts
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        expert = i // chunks
        at = 64 * (i - expert * chunks)
        x = v.load_floats(gates + expert * gate_step + at)
        if limit and CAPPED == 0:
            x = v.smallest(v.splat(limit), x)
        x = activation(x)
        if limit and CAPPED == 1:
            x = v.smallest(v.splat(limit), x)
        if ups:
            up = v.load_floats(ups + expert * up_step + at)
            if limit:
                up = v.largest(v.splat(-limit), v.smallest(v.splat(limit), up))
            x = v.mul(x, v.add(up, shift))
        v.store_floats(outs + expert * out_step + at, x)


def gelu_erf(arguments, thread, threads):
    """The form with erf, in place. Arguments: address, elements."""
    x, n = v.integer_at(arguments), v.integer_at(arguments + 8)
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        value = float(v.float_at(x + 4 * i))
        value *= 0.5 * (1 + math.erf(value * 0.7071067811865476))
        v.store_float(x + 4 * i, np.float32(value))


def xielu(arguments, thread, threads):
    """alpha_p x^2 + beta x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x else, in place.

    Arguments: address, elements; alpha_p, alpha_n, beta, eps.
    """
    values, chunks = v.integer_at(arguments), v.integer_at(arguments + 8) // 16
    above, below = v.splat(v.float_at(arguments + 16)), v.splat(v.float_at(arguments + 24))
    beta, eps = v.splat(v.float_at(arguments + 32)), v.splat(v.float_at(arguments + 40))
    one = v.splat(np.float32(1))
    for i in range(chunks * thread // threads, chunks * (thread + 1) // threads):
        x = v.load_floats(values + 64 * i)
        rest = v.sub(v.sub(v.exp(v.smallest(x, eps)), one), x)
        y = v.where_positive(x, v.mul(above, v.mul(x, x)), v.mul(below, rest))
        v.store_floats(values + 64 * i, v.fma(beta, x, y))
