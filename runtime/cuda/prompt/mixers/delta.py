"""Gated delta nets over many rows: one product for the inputs of the convolution and the gates, the
rule in chunks in float32.
"""

from __future__ import annotations

import functools

import torch

from .....cuda_kernels.common.delta_heads import DeltaHeads
from .....cuda_kernels.prompt.delta import DeltaKernels, delta_rule, fitting_stages
from .....cuda_kernels.prompt.delta_chunks import DeltaWeights, rates_product
from .....cuda_kernels.prompt.recurrent import shared_limit
from ....layers.batch import Batch
from ....layers.recurrent.delta_net import DeltaNet
from ...common.context import Context
from ...common.delta_shapes import check_devices, delta_heads, inputs, rates
from ...common.registry import PROMPT, PlacedBranch, Slow, executor
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, DeltaNet)
class PromptDelta(PromptRecurrent):
    """h += delta_net(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: DeltaNet = branch.module
        s = net.spec
        check_norm(branch.norm, context)
        check_devices(net, context)
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        self.heads = delta_heads(net)
        self.kept = (
            (s.convolution - 1, s.channels),
            (s.value_heads, s.key_length, s.value_length),
        )
        if not fitting_stages(self.heads, shared_limit(context.device)):
            raise Slow(f"heads of {s.key_length} and {s.value_length}")
        # Exact: in 8 bits, errors of the inputs add up in the state.
        self.inputs = Product("delta inputs", inputs(net), context, exact=True)
        small = (net.ba, net.beta, net.alpha)
        self.observed_rates = [n for linear in small if linear is not None for n in linear.observed]
        self.rates = rates(net, context).flatten(0, 1).to(context.dtype)
        self.output = Product("delta", [net.output], context, exact=True)
        self.weights = DeltaWeights(net.convolution, net.dt, net.a, net.norm.weight, net.norm.eps)

    def _project(self, stream: Stream, batch: Batch) -> None:
        x = stream.normed(self.norm)
        self.inputs(x)
        self.context.taps.show(self.observed_rates, x)
        rates_product(x, self.rates, self._rates(len(x)))

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffers: a graph may have computed them."""
        rows = batch.n_sequences * batch.n_tokens
        products = self.inputs.out(rows)
        past, before = self._before(batch)
        delta_rule(
            _kernels(self.heads, self.context.dtype, self.context.device),
            self.weights,
            products,
            products if self.heads.joined else products[:, self.net.spec.channels :],
            self._rates(rows),
            batch.n_sequences,
            past,
            before,
            self._after(batch),
            self._mixed(stream),
            self.context.buffer,
        )
        if batch.states is not None:
            self._keep_last(batch, self._channels(products[1 - self.net.spec.convolution :]))

    def _channels(self, products: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the convolution, float32[rows, channels], in its order."""
        s = self.net.spec
        if not self.heads.joined:
            return products[:, : s.channels].float()
        values = s.value_heads // s.key_heads * s.value_length
        by_head = products.float().unflatten(1, (s.key_heads, -1))
        *qkv, _ = by_head.split([s.key_length, s.key_length, values, values], dim=-1)
        return torch.cat([part.flatten(1) for part in qkv], dim=1)

    def _rates(self, rows: int) -> torch.Tensor:
        return self.context.buffer("delta rates", (rows, len(self.rates)), torch.float32)


@functools.cache
def _kernels(heads: DeltaHeads, half: torch.dtype, device: torch.device) -> DeltaKernels:
    return DeltaKernels(heads, half, device)
