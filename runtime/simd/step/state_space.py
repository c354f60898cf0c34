"""State-space layers of Mamba-2 for one token: the recurrence, the gate of its results, and norms
of groups. The convolution is that of delta nets.
"""

from __future__ import annotations

import math

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v
from .activations import silu
from .heads import SEQUENCE
from .norms import rms_factor

_silu = inlined_function(silu)
_LINEAR = 20.0  # softplus(x) is x from there on, as in torch


def apply_recurrence(arguments, thread, threads):
    """The recurrence of every head (`layers.recurrent.state_space_rule`), what is added of its
    values, and the gate.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; values of all heads,
    vectors that write and that read of all groups; heads, groups, elements of a head, elements of
    these vectors; steps of heads, dt, a, d; gates; the result.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    values, writes = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    reads, heads = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    groups, n = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    n_state, steps = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    dts, rates = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    skips, gates = v.integer_at(arguments + 96), v.integer_at(arguments + 104)
    outs, memories = v.integer_at(arguments + 112), v.integer_at(layer + 8)
    for head in range(heads * thread // threads, heads * (thread + 1) // threads):
        group = head // (heads // groups)
        b, c = writes + 4 * n_state * group, reads + 4 * n_state * group
        of_head = 4 * n * head
        memory = memories + n_state * of_head
        step = float(v.float_at(steps + 4 * head) + v.float_at(dts + 4 * head))
        soft = np.float32(step if step > _LINEAR else math.log1p(math.exp(step)))
        decay = v.splat(np.float32(math.exp(v.float_at(rates + 4 * head) * soft)))
        length, skip = v.splat(soft), v.splat(v.float_at(skips + 4 * head))
        for at in range(0, 4 * n, 64):
            x = v.load_floats(values + of_head + at)
            written, read = v.mul(x, length), v.splat(np.float32(0))
            for i in range(n_state):
                cell = memory + 4 * n * i + at
                kept = v.mul(v.load_floats(cell), decay)
                kept = v.add(kept, v.mul(v.splat(v.float_at(b + 4 * i)), written))
                v.store_floats(cell, kept)
                read = v.fma(v.splat(v.float_at(c + 4 * i)), kept, read)
            read = v.add(read, v.mul(x, skip))
            gate = _silu(v.load_floats(gates + of_head + at))
            v.store_floats(outs + of_head + at, v.mul(read, gate))


def norm_groups(arguments, thread, threads):
    """RMS norms of groups, in place. Arguments: address, groups, elements of each; weights of all;
    epsilon.
    """
    x, groups = v.integer_at(arguments), v.integer_at(arguments + 8)
    n, weights = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    eps = v.float_at(arguments + 32)
    for group in range(groups * thread // threads, groups * (thread + 1) // threads):
        first = 4 * n * group
        factor = v.splat(rms_factor(x + first, n, eps))
        for at in range(first, first + 4 * n, 64):
            normed = v.mul(v.load_floats(x + at), factor)
            v.store_floats(x + at, v.mul(normed, v.load_floats(weights + at)))
