"""`-sm layer`: whole layers on each rank, and the residual stream handed from rank to rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch


class Line(Protocol):
    """What ranks with whole layers do together; `group.Group` between processes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor to another rank, which calls `receive`."""
        ...

    def receive(self, x: torch.Tensor, sender: int) -> None:
        """Overwrite x, a contiguous tensor, with what `sender` sends."""
        ...

    def spread(self, x: torch.Tensor, owner: int) -> None:
        """Overwrite x, a contiguous tensor, on all ranks with that of `owner`."""
        ...

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rank 0, as many as all ranks pass."""
        ...

    def from_first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        ...

    def await_first(self) -> None:
        """Return when rank 0 has come here, however long that takes."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        ...


@dataclass(frozen=True)
class Stage:
    """The layers of one rank: those before `ends[rank]` that no rank before it has. What moves is
    on `device`, the rank's own.

    Every rank embeds tokens and computes logits; only the layers between are divided.
    """

    ends: tuple[int, ...]
    line: Line
    device: torch.device

    @property
    def layers(self) -> range:
        """The numbers of the layers on this rank."""
        return self.layers_of(self.line.rank)

    def layers_of(self, rank: int) -> range:
        """Return the numbers of the layers on a rank."""
        return range(self.ends[rank - 1] if rank else 0, self.ends[rank])

    @property
    def is_last(self) -> bool:
        return self.line.rank == self.line.size - 1

    def take(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the first layer of this rank reads: h float32[rows, width], the embeddings,
        on rank 0; else what the rank before sends, which overwrites h if it is on `device`.
        """
        if self.line.rank == 0:
            return h
        h = h.to(self.device).contiguous()
        self.line.receive(h, self.line.rank - 1)
        return h

    def hand_on(self, h: torch.Tensor, rows: int, *, final: bool = True) -> torch.Tensor:
        """Send h float32[n, width], what the last layer of this rank gives, to the next rank.

        Return float32[rows, width], what the last layer of the model gives, on every rank. Without
        `final` nobody wants that: return h, and do not wait for later ranks.
        """
        h = h.to(self.device).contiguous()
        if not self.is_last:
            self.line.send(h, self.line.rank + 1)
        if final:
            if not self.is_last:
                h = h.new_empty(rows, h.shape[1])
            self.line.spread(h, self.line.size - 1)
        return h


def layer_ends(
    n_layers: int, shares: Sequence[float], first: int = 0, together: Collection[range] = ()
) -> tuple[int, ...]:
    """Return the layer before which the layers of each rank end.

    Layers from `first` on are divided by `shares`; the first rank has those before as well. Layers
    in one range of `together` stay on one rank: a cut within moves to the nearer end of the range.
    A rank that is given a share has a layer if there are enough.
    """
    divided, total = n_layers - first, sum(shares)
    wanted = [first + round(divided * part / total) for part in accumulate(shares)]
    ends: list[int] = []
    for rank, end in enumerate(wanted[:-1]):
        begin = ends[-1] if ends else first
        more = sum(share > 0 for share in shares[rank + 1 :])
        if shares[rank] > 0:
            end = max(end, begin + 1)
        ends.append(max(begin, min(end, n_layers - more)))
    for number, end in enumerate(ends):
        for group in together:
            if group.start < end < group.stop:
                near = end - group.start <= group.stop - end and group.start > 0
                end = group.start if near else group.stop
        ends[number] = max(end, ends[number - 1] if number else 0)
    return (*ends, n_layers)
