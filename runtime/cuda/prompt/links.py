"""How ranks meet within a pass of many rows: in the memory that their GPUs share."""

from __future__ import annotations

import torch

from ....cuda_kernels.peer.links import MOST_RANKS
from ....cuda_kernels.peer.rows import PeerRows
from ....cuda_kernels.prompt.rows import norm_fits
from ....errors import DeviceError
from ...network.network import Network
from ...parallel.payload import FEW_ROWS
from ..common.context import Context


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
