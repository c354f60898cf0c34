"""Plans of Kimi delta attention."""

from __future__ import annotations

import numpy as np

from ..layers.recurrent.kimi_delta import KimiDelta
from ..simd.operations import operation
from ..simd.step import delta, kimi_delta
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


def plan_kimi_delta(plan: Plan, module: KimiDelta, x: Buffer) -> Buffer:
    """Add what the module gives for the normed state x."""
    s, memory = module.spec, plan.memory
    if s.length % LANES or s.convolution < 2:
        raise NotPlanned(f"Kimi delta attention with heads of {s.length} elements")
    inputs = memory.floats("inputs of kimi delta", s.channels)
    for i, product in enumerate(module.qkv):
        plan.product(product, x, inputs.at(i * s.inner))
    beta = plan.product(module.beta, x, "beta of kimi delta")
    rates = ("decay", module.decay), ("gate", module.gate)
    firsts = [plan.product(of[0], x, f"{name} of kimi delta, first") for name, of in rates]
    plan.meet()
    convolved = memory.floats("convolved", s.channels)
    plan.add(
        operation(delta.convolve),
        *(plan.frame_address, plan.layer_offset, inputs.address),
        *(memory.array(4 * np.arange(s.channels)[::LANES]), s.channels, s.convolution),
        *(memory.vector(module.convolution.T), convolved.address, 0),
    )
    decay, gate = (
        plan.product(of[1], first, f"{name} of kimi delta") if of[1:] else first
        for first, (name, of) in zip(firsts, rates, strict=True)
    )
    plan.meet()
    mixed = memory.floats("mixed", s.inner)
    plan.add(
        operation(
            kimi_delta.apply_rule,
            "apply_rule_bounded" if s.bound else "apply_rule",
            BOUNDED=int(s.bound != 0),
        ),
        *(plan.frame_address, plan.layer_offset, convolved.address),
        *(convolved.at(s.inner).address, convolved.at(2 * s.inner).address),
        *(s.heads, s.length, decay.address, memory.vector(module.dt), memory.vector(module.a)),
        *(beta.address, gate.address, memory.vector(module.norm.weight), float(module.norm.eps)),
        *(mixed.address, s.bound),
    )
    y = plan.product(module.output, mixed, "delta")
    plan.meet()
    return y
