"""State-space layers of Mamba-2 over many rows: products on tensor cores, and between them the
recurrence in chunks in float32, by torch.
"""

from __future__ import annotations

from ....layers.batch import Batch
from ....layers.recurrent.state_space import StateSpace
from ...common.context import Context
from ...common.registry import PROMPT, Placed, PlacedBranch, executor
from ..common.graphs import Stage
from ..common.stream import Stream, check_norm
from ..common.weights import Product
from .recurrent import PromptRecurrent


@executor(PROMPT, StateSpace)
class PromptStateSpace(PromptRecurrent):
    """h += state_space(norm(h))."""

    def __init__(self, branch: PlacedBranch, context: Context):
        net: StateSpace = branch.module
        check_norm(branch.norm, context)
        if net.convolution.device != context.device:
            raise Placed(f"its convolution is not on {context.device}")
        self.branch, self.norm, self.net, self.context = branch, branch.norm, net, context
        # Exact: in 8 bits, errors of the inputs add up in the state.
        self.input = Product("state space inputs", [net.input], context, exact=True)
        self.output = Product("delta", [net.output], context, exact=True)

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(True, self._project), (False, self._mix), (self._joins_in_a_graph(), self._join)]

    def _project(self, stream: Stream, batch: Batch) -> None:
        self.input(stream.normed(self.norm))

    def _mix(self, stream: Stream, batch: Batch) -> None:
        """Read the products from their buffer: a graph may have computed them."""
        products = self.input.out(len(stream.h)).float()
        self._mixed(stream).copy_(self.net.mixed(products, batch))
