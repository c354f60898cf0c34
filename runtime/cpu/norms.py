"""Norms in the plan of a step: of a vector inside a layer, and of the hidden state after layers."""

from __future__ import annotations

from ..layers.norm import LayerNorm, Norm, RMSNorm
from ..simd.operations import operation
from ..simd.step import norms
from .memory import Buffer
from .plan import LANES, NotPlanned, Plan


def norm_of(plan: Plan, norm: Norm, x: Buffer, n: int, name: str) -> Buffer:
    """Add the RMS norm of a vector of n elements that all threads share, for every thread; return
    where it is.
    """
    if not isinstance(norm, RMSNorm) or n % LANES:
        raise NotPlanned(f"a norm of {n} elements inside a layer")
    out = plan.memory.own_floats(name, n)
    plan.add(
        operation(norms.rms_norm),
        *(x.address, n, *out, plan.memory.vector(norm.weight), float(norm.eps)),
        meet=False,
    )
    return out


def norm_together(plan: Plan, norm: Norm, x: Buffer, n: int, name: str) -> Buffer:
    """Add the RMS norm of a vector of n elements, of which every thread computes a part; return
    where it is. Threads have not met after it.
    """
    if not isinstance(norm, RMSNorm) or n % LANES:
        raise NotPlanned(f"a norm of {n} elements inside a layer")
    out = plan.memory.floats(name, n)
    plan.add(
        operation(norms.rms_norm_together),
        *(x.address, n, out.address, plan.memory.vector(norm.weight), float(norm.eps)),
        meet=False,
    )
    return out


def add_and_norm(
    plan: Plan,
    h: Buffer,
    delta: Buffer | None,
    n: int,
    norm: Norm | None,
    out: Buffer,
    *,
    first: float = 0.0,
    post: Norm | None = None,
) -> None:
    """Add to the hidden state, and norm it. first: the factor of the first state."""
    if n % LANES:
        raise NotPlanned(f"hidden states of {n} elements are no multiple of {LANES}")
    if isinstance(post, LayerNorm):
        raise NotPlanned("a LayerNorm after a layer")
    head = (
        *(*h, 0 if delta is None else delta.address, n, int(first != 0), float(first)),
        0 if post is None else plan.memory.vector(post.weight),
        0.0 if post is None else float(post.eps),
        *out,
    )
    if isinstance(norm, LayerNorm):
        plan.add(
            operation(norms.add_and_layer_norm),
            *(*head, plan.memory.vector(norm.weight), float(norm.eps)),
            plan.memory.vector(norm.bias),
            meet=False,
        )
        return
    weight = 0 if norm is None else plan.memory.vector(norm.weight)
    eps = 0.0 if norm is None else float(norm.eps)
    plan.add(operation(norms.add_and_rms_norm), *head, weight, eps, meet=False)
