"""How ranks meet within a pass of many rows: in the memory that their GPUs share, or through
collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ....cuda_kernels.peer.links import MOST_RANKS
from ....cuda_kernels.peer.rows import PeerRows
from ....cuda_kernels.prompt.rows import norm_fits
from ....errors import DeviceError
from ...layers.batch import Batch
from ...network.network import Network
from ...parallel.payload import FEW_ROWS
from ...weights.ranges import opened
from ..common.context import Context
from ..common.registry import PlacedBranch
from .common.graphs import Stage, Staged
from .common.stream import Stream

if TYPE_CHECKING:
    from ...parallel.group import Group


def row_links_of(network: Network, context: Context) -> PeerRows | None:
    """Return how the ranks of `context` meet in prompts; None for a model on one rank, and where
    sums go through collectives. All ranks get the same.
    """
    group = context.group
    if group is None or context.device.type != "cuda" or not group.ranks.one_host:
        return None
    if group.size > MOST_RANKS or not norm_fits(network.width):
        return None
    moved = group.moved_type(FEW_ROWS + 1)
    if moved is None:  # blocks of 8 bits
        return None
    sizes = ((max(context.ubatch, FEW_ROWS), moved), (FEW_ROWS, torch.float32))
    try:
        return PeerRows(
            group.rank,
            group.size,
            sizes,
            network.width,
            context.device,
            group.exchange,
            group.timeout,
        )
    except DeviceError as error:
        if context.verbose is not None:
            context.verbose(f"sums of prompts go through NCCL: {error}")
        return None


class Summed(Staged):
    """An executor whose results are parts of a sum over ranks, and the sum. A graph contains the
    sum only if GPUs meet without their hosts: so ranks may capture at different times.
    """

    def __init__(
        self, executor: Any, branch: PlacedBranch, group: Group, context: Context, width: int
    ):
        self.executor, self.branch, self.group = executor, branch, group
        self.context, self.width = context, width

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        inner = self.executor
        parts = inner.stages(batch) if isinstance(inner, Staged) else [(False, inner)]
        if self.context.row_links is not None:
            return [(True, self._begin), *parts, (True, self._meet)]
        again = not self.context.defers(self.width)
        return [(False, self._begin), *parts, (again, self._join), (False, self._sum)]

    def _begin(self, stream: Stream, batch: Batch) -> None:
        stream.begin_parts()

    def _meet(self, stream: Stream, batch: Batch) -> None:
        stream.meet_parts(self.group, self.branch.branch.post_norm)

    def _join(self, stream: Stream, batch: Batch) -> None:
        stream.join_parts(self.group)

    def _sum(self, stream: Stream, batch: Batch) -> None:
        with opened("", "sum over ranks"):
            stream.sum_parts(self.group, self.branch.branch.post_norm)
