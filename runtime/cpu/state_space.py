"""Plans of state-space layers of Mamba-2."""

from __future__ import annotations

import numpy as np

from ..layers.recurrent.state_space import StateSpace
from ..simd.operations import operation
from ..simd.step import delta, state_space
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


def plan_state_space(plan: Plan, module: StateSpace, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    vectors = s.groups * s.state_length
    if s.head_length % LANES or s.channels % LANES or s.convolution < 2:
        raise NotPlanned(f"state-space layers with heads of {s.head_length} elements")
    inputs = plan.product(module.input, x, "inputs of the state space")
    plan.meet()
    channels, convolved = inputs.at(s.inner), memory.floats("convolved", s.channels)
    plan.add(
        operation(delta.convolve),
        *(plan.frame_address, plan.layer_offset, channels.address),
        *(memory.array(4 * np.arange(s.channels)[::LANES]), s.channels, s.convolution),
        *(memory.vector(module.convolution.T), convolved.address, memory.vector(module.bias)),
    )
    mixed = memory.floats("mixed", s.inner)
    writes, reads = convolved.at(s.inner), convolved.at(s.inner + vectors)
    plan.add(
        operation(state_space.apply_recurrence),
        *(plan.frame_address, plan.layer_offset),
        *(convolved.address, writes.address, reads.address),
        *(s.heads, s.groups, s.head_length, s.state_length),
        *(channels.at(s.channels).address, memory.vector(module.dt)),
        *(memory.vector(module.a), memory.vector(module.d), inputs.address, mixed.address),
    )
    if module.norm is not None:
        plan.add(
            operation(state_space.norm_groups),
            *(mixed.address, s.groups, s.inner // s.groups),
            *(memory.vector(module.norm.flatten()), float(module.eps)),
        )
    y = plan.product(module.output, mixed, "delta")
    plan.meet()
    return y
