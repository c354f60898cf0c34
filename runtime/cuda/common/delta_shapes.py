"""What the executors of delta nets for prompts and for steps share."""

from __future__ import annotations

import torch

from ....cuda_kernels.common.delta_heads import DeltaHeads
from ...layers.recurrent.delta_net import DeltaNet
from ...weights.linear import Linear
from .context import Context
from .held import held_decoded
from .registry import Placed


def rates_in_order(ba: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[2 * value_heads, width], beta and alpha of each key head in turn, to [2, value_heads,
    width].
    """
    return ba.unflatten(0, (key_heads, 2, -1)).transpose(0, 1).flatten(1, 2)


def rates(net: DeltaNet, context: Context) -> torch.Tensor:
    """Return the matrices of beta and alpha, float32[2, value_heads, width]. Both are small, and
    stay decoded. `Slow` if they have biases or are on another device.
    """
    if net.ba is not None:
        return rates_in_order(held_decoded(net.ba, context), net.spec.key_heads).contiguous()
    if net.beta is None or net.alpha is None:
        raise TypeError("a delta net needs beta and alpha, or both as one")
    return torch.stack([held_decoded(net.beta, context), held_decoded(net.alpha, context)])


def inputs(net: DeltaNet) -> list[Linear]:
    """Return the products that the convolution and the gates need: one if they are joined."""
    if net.qkvz is not None:
        return [net.qkvz]
    if net.qkv is None or net.gate is None:
        raise TypeError("a delta net needs qkv and gate, or both as one")
    return [net.qkv, net.gate]


def delta_heads(net: DeltaNet) -> DeltaHeads:
    """Return the shape that kernels are compiled for."""
    s = net.spec
    return DeltaHeads(
        s.key_heads,
        s.value_heads,
        s.key_length,
        s.value_length,
        s.convolution,
        s.tiled,
        joined=net.qkvz is not None,
    )


def check_devices(net: DeltaNet, context: Context) -> None:
    """`Slow` if the small tensors of a delta net are on another device."""
    small = (net.convolution, net.dt, net.a, net.norm.weight)
    if any(x.device != context.device for x in small):
        raise Placed(f"its convolution is not on {context.device}")
