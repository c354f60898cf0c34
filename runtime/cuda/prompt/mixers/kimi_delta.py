"""Kimi delta attention over many rows: products on tensor cores, and between them the rule in
chunks in float32.
"""

from __future__ import annotations

import functools

import torch

from .....cuda_kernels.common.delta_heads import DeltaHeads
from .....cuda_kernels.prompt.delta_chunks import DeltaWeights, rates_product
from .....cuda_kernels.prompt.kimi_delta import KimiDeltaKernels, fitting_stages, kimi_delta_rule
from .....cuda_kernels.prompt.recurrent import shared_limit
from ....layers.batch import Batch
from ....layers.recurrent.kimi_delta import KimiDelta
from ...common.context import Context
from ...common.held import held_decoded
from ...common.registry import PROMPT, Placed, PlacedBranch, Slow, executor
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, KimiDelta)
class PromptKimiDelta(PromptRecurrent):
    """h += kimi_delta(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: KimiDelta = branch.module
        s = net.spec
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        self.heads = DeltaHeads(s.heads, s.heads, s.length, s.length, s.convolution, True, False)
        if not fitting_stages(self.heads, shared_limit(context.device)):
            raise Slow(f"heads of {s.length}")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        self.kept = (s.convolution - 1, s.channels), (s.heads, s.length, s.length)
        firsts = [net.decay[0], net.gate[0]]
        self.sizes = [s.channels, *(x.rows for x in firsts)]
        # Exact: in 8 bits, errors of the inputs add up in the state.
        self.inputs = Product("kimi delta inputs", [*net.qkv, *firsts], context, exact=True)
        # Few rows, on ranks any number of them.
        self.beta = held_decoded(net.beta, context).to(context.dtype)
        self.seconds = [
            Product(f"kimi delta {name}", list(products[1:]), context, exact=True)
            if products[1:]
            else None
            for name, products in (("decay", net.decay), ("gate", net.gate))
        ]
        self.output = Product("delta", [net.output], context, exact=True)
        self.weights = DeltaWeights(net.convolution, net.dt, net.a, net.norm.weight, net.norm.eps)

    def _project(self, stream: Stream, batch: Batch) -> None:
        x = stream.normed(self.norm)
        self.context.taps.show(self.net.beta.observed, x)
        rates_product(x, self.beta, self._beta(len(x)))
        _, *firsts = self._parts(self.inputs(x))
        for second, first in zip(self.seconds, firsts, strict=True):
            if second is not None:
                second(first.contiguous())

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffers: a graph may have computed them."""
        n, s = batch.n_sequences * batch.n_tokens, self.net.spec
        products = self.inputs.out(n)
        _, *firsts = self._parts(products)
        decay, gate = (
            first if second is None else second.out(n)
            for second, first in zip(self.seconds, firsts, strict=True)
        )
        past, before = self._before(batch)
        kimi_delta_rule(
            _kernels(self.heads, self.context.dtype, self.context.device, s.bound),
            self.weights,
            products,
            decay,
            gate,
            self._beta(n),
            batch.n_sequences,
            past,
            before,
            self._after(batch),
            self._mixed(stream),
            self.context.buffer,
        )
        if batch.states is not None:
            self._keep_last(batch, products[1 - s.convolution :, : s.channels].float())

    def _parts(self, products: torch.Tensor) -> list[torch.Tensor]:
        return list(products.split(self.sizes, dim=1))

    def _beta(self, rows: int) -> torch.Tensor:
        return self.context.buffer("kimi delta beta", (rows, len(self.beta)), torch.float32)


@functools.cache
def _kernels(
    heads: DeltaHeads, half: torch.dtype, device: torch.device, bound: float
) -> KimiDeltaKernels:
    return KimiDeltaKernels(heads, half, device, bound)
