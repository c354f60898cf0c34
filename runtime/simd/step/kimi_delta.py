"""Kimi delta attention for one token: the rule, whose decay is per channel, and the gate of its
results. The convolution is that of delta nets.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import vectors as v
from .activations import sigmoid
from .delta import unit_factor
from .heads import SEQUENCE
from .norms import rms_factor

_LINEAR = 20.0  # softplus(x) is x from there on, as in torch

# What `operation` binds: 1 if logarithms of decays have a lower bound.
BOUNDED: Any = 0


def apply_rule(arguments, thread, threads):
    """The rule of every head (see `layers.recurrent.kimi_delta_rule`), the norm of its result, and
    its gate.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, k and v of all
    heads; heads, their elements; what gives the decays, of all elements, which become these; dt, a;
    beta; gates; norm of the results, its eps; the result; the bound of logarithms of decays.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    queries, keys = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    values, heads = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    n, decays = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    dts, rates = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    betas, gates = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    weights, eps = v.integer_at(arguments + 96), v.float_at(arguments + 104)
    outs, memories = v.integer_at(arguments + 112), v.integer_at(layer + 8)
    for head in range(heads * thread // threads, heads * (thread + 1) // threads):
        of_head = 4 * n * head
        q, k, value, out = queries + of_head, keys + of_head, values + of_head, outs + of_head
        memory, decay = memories + n * of_head, decays + of_head
        rate = v.float_at(rates + 4 * head)
        for i in range(n):
            x = float(v.float_at(decay + 4 * i) + v.float_at(dts + of_head + 4 * i))
            if BOUNDED:
                log = v.float_at(arguments + 120) / (1 + math.exp(-rate * x))
            else:
                log = rate * np.float32(x if x > _LINEAR else math.log1p(math.exp(x)))
            v.store_float(decay + 4 * i, np.float32(math.exp(log)))
        beta = v.splat(np.float32(1 / (1 + math.exp(-v.float_at(betas + 4 * head)))))
        scale = np.float32(1 / math.sqrt(n))
        q_factor, k_factor = unit_factor(q, n) * scale, unit_factor(k, n)
        for at in range(0, 4 * n, 64):
            known = v.splat(np.float32(0))
            for i in range(n):
                cell = memory + 4 * n * i + at
                kept = v.mul(v.load_floats(cell), v.splat(v.float_at(decay + 4 * i)))
                v.store_floats(cell, kept)
                known = v.fma(v.splat(v.float_at(k + 4 * i) * k_factor), kept, known)
            error = v.mul(beta, v.sub(v.load_floats(value + at), known))
            read = v.splat(np.float32(0))
            for i in range(n):
                cell = memory + 4 * n * i + at
                change = v.mul(v.splat(v.float_at(k + 4 * i) * k_factor), error)
                kept = v.add(v.load_floats(cell), change)
                v.store_floats(cell, kept)
                read = v.fma(v.splat(v.float_at(q + 4 * i) * q_factor), kept, read)
            v.store_floats(out + at, read)
        factor = v.splat(rms_factor(out, n, eps))
        for at in range(0, 4 * n, 64):
            normed = v.mul(v.mul(v.load_floats(out + at), factor), v.load_floats(weights + at))
            gate = sigmoid(v.load_floats(gates + of_head + at))
            v.store_floats(out + at, v.mul(normed, gate))
