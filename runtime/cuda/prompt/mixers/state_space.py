"""State-space layers of Mamba-2 over many rows: products on tensor cores, and between them the
recurrence in chunks in float32.
"""

from __future__ import annotations

import functools

import torch

from .....cuda_kernels.prompt import state_space as kernels
from .....cuda_kernels.prompt.recurrent import shared_limit
from .....cuda_kernels.prompt.state_space import StateSpaceKernels, StateSpaceWeights
from .....cuda_kernels.step.state_space import StateSpaceShape
from ....layers.batch import Batch
from ....layers.recurrent.state_space import StateSpace
from ...common.context import Context
from ...common.registry import PROMPT, Placed, PlacedBranch, Slow, executor
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, StateSpace)
class PromptStateSpace(PromptRecurrent):
    """h += state_space(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: StateSpace = branch.module
        s = net.spec
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        sizes = (s.heads, s.groups, s.head_length, s.state_length, s.convolution)
        self.shape = StateSpaceShape(1, *sizes)
        if not kernels.fitting_stages(self.shape, shared_limit(context.device)):
            raise Slow(f"heads of {s.head_length} elements with states of {s.state_length}")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        self.kept = (s.convolution - 1, s.channels), (s.heads, s.state_length, s.head_length)
        # Exact: in 8 bits, errors of the inputs add up in the state.
        self.input = Product("state space inputs", [net.input], context, exact=True)
        self.output = Product("delta", [net.output], context, exact=True)
        self.weights = StateSpaceWeights(
            net.convolution, net.bias, net.dt, net.a, net.d, net.norm, net.eps
        )

    def _project(self, stream: Stream, batch: Batch) -> None:
        self.input(stream.normed(self.norm))

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffer: a graph may have computed them."""
        s = self.net.spec
        products = self.input.out(batch.n_sequences * batch.n_tokens)
        past, before = self._before(batch)
        kernels.state_space(
            _kernels(self.shape, self.context.dtype, self.context.device),
            self.weights,
            products,
            batch.n_sequences,
            past,
            before,
            self._after(batch),
            self._mixed(stream),
            self.context.buffer,
        )
        if batch.states is not None:
            last = products[1 - s.convolution :, s.inner : s.inner + s.channels]
            self._keep_last(batch, last.float())


@functools.cache
def _kernels(shape: StateSpaceShape, half: torch.dtype, device: torch.device) -> StateSpaceKernels:
    return StateSpaceKernels(shape, half, device)
