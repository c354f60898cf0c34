"""What looks at the products of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

# (tensor name, x float32[rows, n_in], expert of each row int64[rows] or None)
Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


class Taps:
    """What looks at the products of a model.

    `observers` see every product, and `readers` of them use its input (see `Model.observe`). While
    `watching`, sums of results are gathered, and `first_not_finite` tells which tensor gave the
    first one that is not finite.
    """

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.readers = 0
        self.watching = False
        self._sums: list[tuple[str, torch.Tensor]] = []

    def check(self, name: str, y: torch.Tensor) -> None:
        """Remember a result while `watching`."""
        if self.watching:
            self._sums.append((name, y.sum()))

    def first_not_finite(self) -> str | None:
        """Return the tensor whose product first gave infinity or NaN since the last call; None if
        all numbers were finite. Waits for the device once.
        """
        names = [name for name, _ in self._sums]
        sums = [total.to(torch.float32) for _, total in self._sums]
        self._sums.clear()
        if not sums:
            return None
        home = sums[-1].device
        finite = torch.stack([total.to(home) for total in sums]).isfinite().tolist()
        return None if all(finite) else names[finite.index(False)]
