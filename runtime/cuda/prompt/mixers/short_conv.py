"""Gated short convolutions over many rows: one product for b, c and x, the convolution in
float32.
"""

from __future__ import annotations

import torch

from .....cuda_kernels.prompt import short_conv as prompt_conv
from ....layers.batch import Batch
from ....layers.recurrent.short_conv import ShortConv
from ....state.recurrent import RecurrentState
from ...common.context import Context
from ...common.registry import PROMPT, Placed, PlacedBranch, Slow, executor
from ..common.graphs import Stage
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, ShortConv)
class PromptShortConv(PromptRecurrent):
    """h += short_conv(norm(h)). The state of a kept sequence stays where it is."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: ShortConv = branch.module
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        if not 2 <= net.spec.taps <= prompt_conv.MOST_TAPS:
            raise Slow(f"a convolution of {net.spec.taps} taps")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        self.inputs = Product("convolution inputs", [net.inputs], context)
        self.output = Product("delta", [net.output], context)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        mix: list[tuple[bool, Stage]] = [(True, self._mix)]
        if batch.states is not None:
            mix = [(False, self._load), *mix, (False, self._store)]
        return [(True, self._project), *mix, (self._joins_in_a_graph(), self._join)]

    def _project(self, stream: Stream, batch: Batch) -> None:
        self.inputs(stream.normed(self.norm))

    def _load(self, stream: Stream, batch: Batch) -> None:
        """Bring the state to where `_mix` changes it."""
        state = batch.state
        if not isinstance(state, RecurrentState):
            raise TypeError(f"layer {batch.layer} keeps no recurrent state")
        state.check(batch.start, batch.layer)
        self._held().copy_(state.inputs)

    def _store(self, stream: Stream, batch: Batch) -> None:
        state = batch.state
        assert isinstance(state, RecurrentState)  # `_load` has checked it
        state.update(batch.n_tokens, self._held(), state.memory)

    def _held(self) -> torch.Tensor:
        """Return a buffer for the last b * x."""
        s = self.net.spec
        return self.context.buffer(
            "convolution inputs of a sequence", (s.taps - 1, s.channels), torch.float32
        )

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffer: a graph may have computed them."""
        n, rows = batch.n_tokens, batch.n_sequences * batch.n_tokens
        products = self.inputs.out(rows)
        past = None if batch.states is None else self._held()
        prompt_conv.short_conv(
            products, past, self.net.convolution, batch.n_sequences, self._mixed(stream)
        )
        if past is not None:
            b, _, x = products[max(0, n - len(past)) :].float().chunk(3, dim=1)
            past.copy_(torch.cat([past[n:], b * x]))
