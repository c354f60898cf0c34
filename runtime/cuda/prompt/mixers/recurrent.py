"""What layers with recurrent states share over many rows: how their results are joined."""

from __future__ import annotations

import torch

from ....layers.batch import Batch
from ...common.context import Context
from ...common.registry import PlacedBranch
from ..common.graphs import Staged
from ..common.stream import Stream, last_rows
from ..common.weights import Product


class PromptRecurrent(Staged):
    """h += output(what is mixed), in a buffer that a graph may have filled."""

    branch: PlacedBranch
    context: Context
    output: Product

    def _join(self, stream: Stream, batch: Batch) -> None:
        mixed = self._mixed(stream)
        if stream.narrows:
            stream.keep_last(batch.n_sequences)
            mixed = last_rows(mixed, batch.n_sequences).contiguous()
        stream.add_product(self.output, mixed, self.branch.post_norm)

    def _joins_in_a_graph(self) -> bool:
        """Return whether `_join` can be part of a graph."""
        return not (self.branch.is_summed and self.context.defers(self.output.rows))

    def _mixed(self, stream: Stream) -> torch.Tensor:
        return self.context.buffer("mixed", (len(stream.h), self.output.cols), self.context.dtype)
