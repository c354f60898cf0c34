"""How ranks meet within a decoding step: in the memory that their GPUs share, or through NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from ....cuda_kernels.peer.links import MOST_RANKS, PeerLinks
from ....errors import DeviceError
from ...layers.dense_and_experts import DenseAndExperts
from ...network.network import Network
from ...parallel.group import Group
from ..common.context import Context
from .frame import STEP_ROWS


class Links(Protocol):
    """Sums and concatenations that can be captured."""

    def sum(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """h += the sum of x over all ranks, both float32[rows, width]; x becomes 0."""
        ...

    def assign(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """h = the sum of x over all ranks, both float32[rows, width]; x becomes 0."""
        ...

    def gather(self, x: torch.Tensor, out: torch.Tensor, ends: Sequence[int]) -> None:
        """out float32[rows, ends[-1]] = the columns x of all ranks side by side."""
        ...

    @property
    def missing(self) -> int | None:
        """The rank for which this one has waited too long; None if there is none."""
        ...


class SharedMemoryLinks:
    """One launch each, through the memory of the other GPUs of this host."""

    def __init__(self, links: PeerLinks):
        self._links = links

    @property
    def missing(self) -> int | None:
        """See `Links`; a launch that waits for another rank notes it."""
        return self._links.missing

    def sum(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """See `Links`: x, h float32[rows, width], added in the order of ranks."""
        self._links.sum(x, h)

    def assign(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """See `Links`: x, h float32[rows, width], added in the order of ranks."""
        self._links.sum(x, h, assign=True)

    def gather(self, x: torch.Tensor, out: torch.Tensor, ends: Sequence[int]) -> None:
        """See `Links`: x float32[rows, columns of this rank]."""
        self._links.gather(x, out, ends)


class NcclLinks:
    """Collectives of NCCL: for ranks on several hosts, or GPUs that cannot reach each other."""

    missing = None

    def __init__(self, group: Group):
        self._group = group

    def sum(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """See `Links`: x, h float32[rows, width], added in the order that NCCL takes."""
        dist.all_reduce(x)
        h.add_(x)
        x.zero_()

    def assign(self, x: torch.Tensor, h: torch.Tensor) -> None:
        """See `Links`: x, h float32[rows, width], added in the order that NCCL takes."""
        dist.all_reduce(x)
        h.copy_(x)
        x.zero_()

    def gather(self, x: torch.Tensor, out: torch.Tensor, ends: Sequence[int]) -> None:
        """See `Links`: x float32[rows, columns of this rank]."""
        out.copy_(self._group.gather(x, ends))


def links_of(network: Network, context: Context) -> Links | None:
    """Return how the ranks of `context` meet in steps; None for a model on one rank. All ranks get
    the same kind.
    """
    share, group = context.share, context.group
    if share is None or group is None:
        return None
    if not group.ranks.one_host or group.size > MOST_RANKS or network.width % 4:
        return NcclLinks(group)
    counts = [stop - start for start, stop in zip((0, *share.ends), share.ends, strict=False)]
    branches = (branch for block in network.blocks for branch in block.branches)
    # A dense layer and experts are summed in one exchange.
    together = 1 + any(isinstance(branch.module, DenseAndExperts) for branch in branches)
    elements = STEP_ROWS * max(together * network.width, -(-max(counts, default=0) // 4) * 4)
    try:
        found = PeerLinks(
            group.rank, group.size, elements, context.device, group.exchange, group.timeout
        )
    except DeviceError as error:
        if context.verbose is not None:
            context.verbose(f"sums of steps go through NCCL: {error}")
        return NcclLinks(group)
    return SharedMemoryLinks(found)


@contextmanager
def named_waits(links: Links | None, context: Context) -> Iterator[None]:
    """While the context is open, a kernel of a step, or of the prompt before, that has waited too
    long raises a DeviceError that says for whom.
    """
    try:
        yield
    except RuntimeError as error:
        places = ((links, "a step"), (context.row_links, "a prompt"))
        for meeting, where in places:
            missing = None if meeting is None else meeting.missing
            if missing is None or (group := context.group) is None:
                continue
            raise DeviceError(
                f"rank {group.rank} of {group.size} has waited {group.timeout:.0f} s for rank"
                f" {missing} in {where} (--timeout)"
            ) from error
        raise
