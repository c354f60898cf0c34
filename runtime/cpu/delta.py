"""Plans of gated delta nets."""

from __future__ import annotations

import numpy as np

from ..layers.recurrent.delta_net import DeltaNet
from ..simd.operations import operation
from ..simd.step import delta as delta_step
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


def plan_delta_net(plan: Plan, module: DeltaNet, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    if s.sigmoid:
        raise NotPlanned("gates of delta nets by a sigmoid")
    if s.key_length % LANES or s.value_length % LANES or s.convolution < 2:
        raise NotPlanned(f"delta nets with heads of {s.key_length} and {s.value_length} elements")
    inputs, channels, gates = _inputs(plan, module, x)
    rates = _rates(plan, module, x)
    plan.meet()
    convolved = memory.floats("convolved", s.channels)
    plan.add(
        operation(delta_step.convolve),
        *(plan.frame_address, plan.layer_offset, inputs.address),
        *(memory.array(4 * channels[::LANES]), s.channels, s.convolution),
        *(memory.vector(module.convolution.T), convolved.address, 0),
    )
    keys = s.key_heads * s.key_length
    mixed = memory.floats("mixed", s.value_heads * s.value_length)
    plan.add(
        operation(delta_step.apply_rule),
        *(plan.frame_address, plan.layer_offset, convolved.address, convolved.at(keys).address),
        *(convolved.at(2 * keys).address, s.value_heads, s.key_heads, s.key_length),
        *(s.value_length, int(s.tiled)),
        memory.array(np.ascontiguousarray(np.column_stack([*rates, gates]))),
        *(memory.vector(module.dt), memory.vector(module.a)),
        *(memory.vector(module.norm.weight), float(module.norm.eps), mixed.address),
    )
    y = plan.product(module.output, mixed, "delta")
    plan.meet()
    return y


def _inputs(plan: Plan, module: DeltaNet, x: Buffer) -> tuple[Buffer, np.ndarray, np.ndarray]:
    """Add the products that give queries, keys, values and gates. Return where the former are; the
    element of every channel there, int64[channels]; and addresses of the gates of value heads.
    """
    s = module.spec
    heads = np.arange(s.value_heads)
    if module.qkvz is None:
        if module.qkv is None or module.gate is None:
            raise NotPlanned("a delta net without qkv or gate")
        inputs = plan.product(module.qkv, x, "qkv")
        gate = plan.product(module.gate, x, "gate of the delta net")
        return inputs, np.arange(s.channels), gate.address + 4 * s.value_length * heads
    inputs = plan.product(module.qkvz, x, "qkvz")
    group = s.value_heads // s.key_heads
    of_head = np.arange(2 * s.key_length + 2 * group * s.value_length)
    places = np.arange(s.key_heads)[:, None] * len(of_head) + of_head
    cuts = np.cumsum([s.key_length, s.key_length, group * s.value_length])
    q, k, v, z = np.split(places, cuts, axis=1)
    channels = np.concatenate([part.ravel() for part in (q, k, v)])
    return inputs, channels, inputs.address + 4 * z.reshape(s.value_heads, -1)[:, 0]


def _rates(plan: Plan, module: DeltaNet, x: Buffer) -> tuple[np.ndarray, np.ndarray]:
    """Add the products that give beta and alpha; return their addresses for every value head."""
    s = module.spec
    heads = np.arange(s.value_heads)
    if module.ba is not None:
        both = plan.product(module.ba, x, "ba")
        group = s.value_heads // s.key_heads
        first = both.address + 4 * (heads // group * 2 * group + heads % group)
        return first, first + 4 * group
    if module.beta is None or module.alpha is None:
        raise NotPlanned("a delta net without beta or alpha")
    beta, alpha = plan.product(module.beta, x, "beta"), plan.product(module.alpha, x, "alpha")
    return beta.address + 4 * heads, alpha.address + 4 * heads
