"""What looks at the products of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

SMALL = 4096  # elements of a result that is not summed up at once
# (tensor name, x float32[rows, n_in], expert of each row int64[rows] or None)
Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True)
class GroupedRows:
    """Which rows of x experts read, on the device. Grouped rows ends[e - 1] to ends[e] are those of
    expert e; grouped row r is x[sources[r] // n_slots], or x[r] without `sources`. Grouped rows
    after the last expert's are of no expert.

    ends: int32[experts]. sources: int32[grouped rows] or None.
    """

    ends: torch.Tensor
    sources: torch.Tensor | None = None
    n_slots: int = 1


class FastObserver(Protocol):
    """An observer of the reference path that also takes what the fast path reads.

    Where a layer has no executor that shows its inputs, the first method is called, otherwise the
    second.
    """

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None: ...

    def see(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        groups: GroupedRows | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Take the input of several tensors: x half or float32[rows, n], or the rows of experts.
        x must not be kept or changed.

        places: int64[n_in], where the columns are in x; None for x as it is.
        """
        ...


class Taps:
    """What looks at the products of a model.

    `observers` see every product, and `readers` of them use its input (see `Model.observe`). Those
    in `fast` also see what the fast path reads. While `watching`, sums of results, or small results
    themselves, are gathered, and `first_not_finite` tells which tensor gave the first one that is
    not finite.
    """

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.fast: list[FastObserver] = []
        self.readers = 0
        self.watching = False
        self._sums: list[tuple[str, torch.Tensor]] = []

    @property
    def need_reference_path(self) -> bool:
        """Return whether an observer sees inputs of the reference path alone."""
        return len(self.observers) > len(self.fast)

    def show(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        groups: GroupedRows | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Show the input of tensors on the fast path; see `FastObserver.see`."""
        for observer in self.fast:
            observer.see(names, x, groups, places)

    def check(self, name: str, y: torch.Tensor, *, stays: bool = False) -> None:
        """Remember a result while `watching`. stays: nobody changes it before the next call of
        `first_not_finite`, so that a small one can be looked at then.
        """
        if self.watching:
            self._sums.append((name, y if stays and y.numel() <= SMALL else y.sum()))

    def first_not_finite(self) -> str | None:
        """Return the tensor whose product first gave infinity or NaN since the last call; None if
        all numbers were finite. Waits for the device once.
        """
        found = [(name, y.reshape(-1)) for name, y in self._sums]
        self._sums.clear()
        if not found:
            return None
        home = found[-1][1].device
        finite = torch.cat([y.to(home, torch.float32) for _, y in found]).isfinite()
        if finite.all():
            return None
        each = finite.split([len(y) for _, y in found])
        return next(name for (name, _), part in zip(found, each, strict=True) if not part.all())
