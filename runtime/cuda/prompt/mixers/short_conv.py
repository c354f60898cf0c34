"""Gated short convolutions over many rows: one product for b, c and x, the convolution in
float32.
"""

from __future__ import annotations

from .....cuda_kernels.prompt import short_conv as prompt_conv
from ....layers.batch import Batch
from ....layers.recurrent.short_conv import ShortConv
from ...common.context import Context
from ...common.registry import PROMPT, Placed, PlacedBranch, Slow, executor
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, ShortConv)
class PromptShortConv(PromptRecurrent):
    """h += short_conv(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: ShortConv = branch.module
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        if not 2 <= net.spec.taps <= prompt_conv.MOST_TAPS:
            raise Slow(f"a convolution of {net.spec.taps} taps")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        self.kept = (net.spec.taps - 1, net.spec.channels), (0, 0, 0)
        self.inputs = Product("convolution inputs", [net.inputs], context)
        self.output = Product("delta", [net.output], context)

    def _project(self, stream: Stream, batch: Batch) -> None:
        self.inputs(stream.normed(self.norm))

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffer: a graph may have computed them."""
        products = self.inputs.out(batch.n_sequences * batch.n_tokens)
        past, _ = self._before(batch)
        prompt_conv.short_conv(
            products, past, self.net.convolution, batch.n_sequences, self._mixed(stream)
        )
        if batch.states is not None:
            b, _, x = products[1 - self.net.spec.taps :].float().chunk(3, dim=1)
            self._keep_last(batch, b * x)
