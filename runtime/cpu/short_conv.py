"""Plans of gated short convolutions."""

from __future__ import annotations

from ..layers.recurrent.short_conv import ShortConv
from ..simd.operations import operation
from ..simd.step import short_conv as short_conv_step
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


def plan_short_conv(plan: Plan, module: ShortConv, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    if s.channels % LANES or s.taps < 2:
        raise NotPlanned(f"short convolutions of {s.channels} channels with {s.taps} taps")
    inputs = plan.product(module.inputs, x, "convolution inputs")
    plan.meet()
    mixed = memory.floats("mixed", s.channels)
    plan.add(
        operation(short_conv_step.convolve_gated),
        *(plan.frame_address, plan.layer_offset, inputs.address, s.channels, s.taps),
        *(memory.vector(module.convolution.T), mixed.address),
    )
    y = plan.product(module.output, mixed, "convolution")
    plan.meet()
    return y
