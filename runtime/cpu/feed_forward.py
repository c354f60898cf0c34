"""Plans of feed-forward layers and of experts."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from ...formats.kernel import inlined_function
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.moe import MoE
from ..layers.specs import FFNSpec
from ..simd.operations import operation
from ..simd.step import activations, experts
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan

_ACTIVATIONS = {
    "silu": activations.silu,
    "gelu": activations.gelu,
    "relu_squared": activations.relu_squared,
    "swiglu_oai": activations.swiglu_oai,
    "capped_silu": activations.silu,
}


def _activate(
    plan: Plan,
    spec: FFNSpec,
    gate: Buffer,
    up: Buffer | None,
    out: Buffer,
    n: int,
    steps: tuple[int, int, int] = (0, 0, 0),
    n_experts: int = 1,
) -> None:
    """Add the activation of n elements of each expert. steps: elements from the gate, up and result
    of one expert to those of the next.
    """
    if n % LANES:
        raise NotPlanned(f"a feed-forward layer of {n} elements")
    name = spec.activation
    if name == "gelu_erf":
        if up is not None:
            raise NotPlanned("a gated layer with the gelu of erf")
        plan.add(operation(activations.gelu_erf), out.address, n)
        return
    if (by := spec.xielu) is not None:
        plan.add(operation(activations.xielu), out.address, n, *astuple(by))
        return
    plan.add(
        operation(
            activations.activate,
            f"activate_{name}",
            activation=inlined_function(_ACTIVATIONS[name]),
            CAPPED=int(name == "capped_silu"),
        ),
        *(gate.address, 4 * steps[0], 0 if up is None else up.address, 4 * steps[1]),
        *(out.address, 4 * steps[2], n, n_experts),
        *(float(spec.limit), 1.0 if name == "swiglu_oai" else 0.0),
    )


def plan_gated(plan: Plan, module: GatedFFN, x: Buffer, name: str = "delta") -> Buffer:
    """Add what the module gives for x, in a buffer of this name."""
    n = module.down.cols
    if module.spec.cutoff is not None:
        raise NotPlanned("a gate of which few elements are left")
    if module.gate_up is not None:
        gate = plan.product(module.gate_up, x, "gate_up")
        up = gate.at(n)
    elif module.gate is not None and module.up is not None:
        gate, up = plan.product(module.gate, x, "gate"), plan.product(module.up, x, "up")
    else:
        raise NotPlanned("a gated layer without gate or up")
    plan.meet()
    inner = plan.memory.floats("inner", n)
    _activate(plan, module.spec, gate, up, inner, n)
    y = plan.product(module.down, inner, name)
    plan.meet()
    return y


def plan_plain(plan: Plan, module: PlainFFN, x: Buffer, name: str = "delta") -> Buffer:
    """Add what the module gives for x, in a buffer of this name."""
    up = plan.product(module.up, x, "up")
    plan.meet()
    _activate(plan, module.spec, up, None, up, module.down.cols)
    y = plan.product(module.down, up, name)
    plan.meet()
    return y


def plan_moe(plan: Plan, module: MoE, x: Buffer) -> Buffer:
    """Add what the module gives for x."""
    router, spec, memory = module.router, module.spec, plan.memory
    if module.owned is not None:
        raise NotPlanned("experts on several ranks")
    least, threshold = router.reduction or (spec.n_used, 0.0)
    norm = spec.norm or (spec.score == "selected" and router.reduction is not None)
    width, used = module.experts.down.rows, spec.n_used
    logits = plan.product(router.linear, x, "router")
    shared_gate = None
    if module.shared is not None and module.shared_gate is not None:
        shared_gate = plan.product(module.shared_gate, x, "shared_gate")
    plan.meet()
    chosen = memory.own_floats("chosen", 2 * used + 16 + used + 16 + 4 * spec.n_experts)
    weights = chosen.at(2 * used + 16)
    plan.add(
        experts.routing(spec.score, spec.groups > 1),
        *(logits.address, memory.vector(router.bias), spec.n_experts, used),
        *(spec.groups, spec.groups_used, spec.group_best, int(norm), float(spec.scale)),
        *(chosen.address, weights.address, weights.at(used + 16).address, chosen.thread_step),
        *(least, float(threshold), 0),
        meet=False,
    )
    if module.latent is not None:
        return _plan_latent(plan, module, x, chosen, weights)
    read = x
    if spec.on_input:
        if used != 1 or router.reduction is not None:
            raise NotPlanned("weights of several experts that multiply what these read")
        read = memory.floats("weighed", width)
        plan.add(operation(experts.weigh_input), *(x.address, width, read.address), *weights)
        plan.meet()
    slots = plan_experts(plan, module, read, chosen)
    shared = _plan_shared(plan, module, x)
    y = memory.floats("delta", width)
    plan.add(
        operation(experts.combine),
        *(slots.address, 4 * width, used, *weights),
        *(0 if part is None else part.address for part in (shared, shared_gate)),
        *(width, y.address),
    )
    return y


def _plan_shared(plan: Plan, module: MoE, x: Buffer) -> Buffer | None:
    """Add what the expert that works on every token gives for x, if there is one."""
    if module.shared is None:
        return None
    planned = plan_plain if isinstance(module.shared, PlainFFN) else plan_gated
    return planned(plan, module.shared, x, "shared")  # pyright: ignore[reportArgumentType]  its own


def _plan_latent(plan: Plan, module: MoE, x: Buffer, chosen: Buffer, weights: Buffer) -> Buffer:
    """Add what a module gives for x whose experts read and write shorter vectors."""
    memory, used, n = plan.memory, module.spec.n_used, module.experts.down.rows
    if module.latent is None or module.shared_gate is not None:
        raise NotPlanned("experts with shorter vectors and a gate of the shared one")
    inner = plan.product(module.latent.down, x, "latent")
    plan.meet()
    slots, total = plan_experts(plan, module, inner, chosen), memory.floats("latent sum", n)
    combine = operation(experts.combine)
    plan.add(combine, slots.address, 4 * n, used, *weights, 0, 0, n, total.address)
    routed, width = plan.product(module.latent.up, total, "routed"), module.latent.up.rows
    plan.meet()
    shared = _plan_shared(plan, module, x)
    y, once = memory.floats("delta", width), memory.array(np.ones(16, dtype=np.float32))
    always = 0 if shared is None else shared.address
    plan.add(combine, routed.address, 0, 1, once, 0, always, 0, width, y.address)
    return y


def plan_experts(plan: Plan, module: MoE, x: Buffer, chosen: Buffer) -> Buffer:
    """Add the results of the chosen experts, one after the other in memory."""
    e, memory, used = module.experts, plan.memory, module.spec.n_used
    n, width = e.down.cols, e.down.rows
    inner = memory.floats("inner of experts", used * n)
    if e.gate_up is not None:
        gate = memory.floats("gate_up of experts", 2 * used * n)
        plan.products(e.gate_up, x, 0, gate, 2 * n, chosen, used)
        up, step = gate.at(n), 2 * n
    elif e.gate is not None and e.up is not None:
        gate, up = (memory.floats(f"{name} of experts", used * n) for name in ("gate", "up"))
        plan.products(e.gate, x, 0, gate, n, chosen, used)
        plan.products(e.up, x, 0, up, n, chosen, used)
        step = n
    elif e.up is not None and not e.spec.gated:
        gate, up, step = memory.floats("up of experts", used * n), None, n
        plan.products(e.up, x, 0, gate, n, chosen, used)
    else:
        raise NotPlanned("experts without gate or up")
    plan.meet()
    _activate(plan, e.spec, gate, up, inner, n, (step, step, n), used)
    slots = memory.floats("slots", used * width)
    plan.products(e.down, inner, n, slots, width, chosen, used)
    plan.meet()
    return slots
