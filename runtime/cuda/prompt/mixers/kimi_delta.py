"""Kimi delta attention over many rows: products on tensor cores, and between them the rule in
chunks in float32, by torch.
"""

from __future__ import annotations

import torch

from .....cuda_kernels.prompt.delta import rates_product
from ....layers.batch import Batch
from ....layers.recurrent.kimi_delta import KimiDelta
from ...common.context import Context
from ...common.held import held_decoded
from ...common.registry import PROMPT, Placed, PlacedBranch, executor
from ..common.graphs import Stage
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, KimiDelta)
class PromptKimiDelta(PromptRecurrent):
    """h += kimi_delta(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: KimiDelta = branch.module
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        firsts = [net.decay[0], net.gate[0]]
        # Exact: in 8 bits, errors of the inputs add up in the state.
        self.inputs = Product("kimi delta inputs", [*net.qkv, *firsts], context, exact=True)
        # Few rows, on ranks any number of them.
        self.beta = held_decoded(net.beta, context).to(context.dtype)
        self.decay = Product("kimi delta decay", [net.decay[1]], context, exact=True)
        self.gate = Product("kimi delta gate", [net.gate[1]], context, exact=True)
        self.output = Product("delta", [net.output], context, exact=True)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(True, self._project), (False, self._mix), (self._joins_in_a_graph(), self._join)]

    def _project(self, stream: Stream, batch: Batch) -> None:
        x = stream.normed(self.norm)
        self.context.taps.show(self.net.beta.observed, x)
        rates_product(x, self.beta, self._beta(len(x)))
        _, decay, gate = self._parts(self.inputs(x))
        self.decay(decay.contiguous())
        self.gate(gate.contiguous())

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffers: a graph may have computed them. It is in none: the
        state changes where it is, and torch allocates.
        """
        n = batch.n_sequences * batch.n_tokens
        inputs, *_ = self._parts(self.inputs.out(n))
        decay, gate = (product.out(n).float() for product in (self.decay, self.gate))
        mixed = self.net.mixed(inputs.float(), decay, gate, self._beta(n), batch)
        self._mixed(stream).copy_(mixed)

    def _parts(self, products: torch.Tensor) -> list[torch.Tensor]:
        s = self.net.spec
        return list(products.split([s.channels, s.length, s.length], dim=1))

    def _beta(self, rows: int) -> torch.Tensor:
        return self.context.buffer("kimi delta beta", (rows, len(self.beta)), torch.float32)
