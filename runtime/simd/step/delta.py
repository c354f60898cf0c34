"""Gated delta nets for one token: the convolution, which state-space layers have too, the rule, and
the gate of its results.
"""

from __future__ import annotations

import math

import numpy as np

from ....formats.kernel import inlined_function, part_function
from .. import vectors as v
from .activations import silu
from .heads import SEQUENCE
from .norms import inverse_root, rms_factor

_silu = inlined_function(silu)
_L2_EPS = np.float32(1e-6)  # of the norm of queries and keys
_LINEAR = 20.0  # softplus(x) is x from there on, as in torch


def convolve(arguments, thread, threads):
    """Inputs of the last tokens and of this one through the convolution and silu; this one becomes
    the last.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; the input; the place
    in it of every 16 channels, int64, in bytes; channels, taps; their weights float32[taps,
    channels]; the result; what is added to it before silu, float32[channels], or 0.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    bias = v.integer_at(arguments + 64)
    source, places = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    channels, taps = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    weights, out = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    kept, n = v.integer_at(layer), channels // 16
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        at = 64 * i
        total = v.load_floats(bias + at) if bias else v.splat(np.float32(0))
        for tap in range(taps - 1):
            x = v.load_floats(kept + 4 * channels * tap + at)
            total = v.add(total, v.mul(x, v.load_floats(weights + 4 * channels * tap + at)))
            if tap:
                v.store_floats(kept + 4 * channels * (tap - 1) + at, x)
        x = v.load_floats(source + v.integer_at(places + 8 * i))
        total = v.add(total, v.mul(x, v.load_floats(weights + 4 * channels * (taps - 1) + at)))
        if taps > 1:
            v.store_floats(kept + 4 * channels * (taps - 2) + at, x)
        v.store_floats(out + at, _silu(total))


@part_function
def unit_factor(x, n):
    """Return what n numbers are multiplied by to have a sum of squares of 1."""
    a = v.splat(np.float32(0))
    for i in range(0, 4 * n, 64):
        part = v.load_floats(x + i)
        a = v.fma(part, part, a)
    return inverse_root(v.total(a) + _L2_EPS)


def apply_rule(arguments, thread, threads):
    """The gated delta rule of every value head (see `layers.recurrent.delta_rule`), the norm of its
    result, and its gate.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; q, k and v of all
    heads; value heads; key heads, their elements, those of a value; whether value head j reads key
    head j % key heads, otherwise j // (value heads / key heads); the places of beta, alpha and z of
    every value head, addresses int64[value heads, 3]; dt, a; norm of the results, its eps; the
    result.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    queries, keys = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    values, heads = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    key_heads, n_key = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    n_value, tiled = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    places = v.integer_at(arguments + 80)
    dt, rates = v.integer_at(arguments + 88), v.integer_at(arguments + 96)
    weights, eps = v.integer_at(arguments + 104), v.float_at(arguments + 112)
    outs, memories = v.integer_at(arguments + 120), v.integer_at(layer + 8)
    for head in range(heads * thread // threads, heads * (thread + 1) // threads):
        key_head = head % key_heads if tiled else head // (heads // key_heads)
        q, k = queries + 4 * n_key * key_head, keys + 4 * n_key * key_head
        value, out = values + 4 * n_value * head, outs + 4 * n_value * head
        memory, place = memories + 4 * n_key * n_value * head, places + 24 * head
        beta = 1 / (1 + math.exp(-v.float_at(v.integer_at(place))))
        alpha = float(v.float_at(v.integer_at(place + 8)) + v.float_at(dt + 4 * head))
        soft = alpha if alpha > _LINEAR else math.log1p(math.exp(alpha))
        decay = math.exp(v.float_at(rates + 4 * head) * np.float32(soft))
        decay, beta = v.splat(np.float32(decay)), v.splat(np.float32(beta))
        scale = np.float32(1 / math.sqrt(n_key))
        q_factor, k_factor = unit_factor(q, n_key) * scale, unit_factor(k, n_key)
        for at in range(0, 4 * n_value, 64):
            known = v.splat(np.float32(0))
            for i in range(n_key):
                cell = memory + 4 * n_value * i + at
                kept = v.mul(v.load_floats(cell), decay)
                v.store_floats(cell, kept)
                known = v.fma(v.splat(v.float_at(k + 4 * i) * k_factor), kept, known)
            error = v.mul(beta, v.sub(v.load_floats(value + at), known))
            read = v.splat(np.float32(0))
            for i in range(n_key):
                cell = memory + 4 * n_value * i + at
                change = v.mul(v.splat(v.float_at(k + 4 * i) * k_factor), error)
                kept = v.add(v.load_floats(cell), change)
                v.store_floats(cell, kept)
                read = v.fma(v.splat(v.float_at(q + 4 * i) * q_factor), kept, read)
            v.store_floats(out + at, read)
        factor, gate = v.splat(rms_factor(out, n_value, eps)), v.integer_at(place + 16)
        for at in range(0, 4 * n_value, 64):
            normed = v.mul(v.mul(v.load_floats(out + at), factor), v.load_floats(weights + at))
            v.store_floats(out + at, v.mul(normed, _silu(v.load_floats(gate + at))))
