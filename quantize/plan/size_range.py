"""Which sizes a choice of types can reach, as far as that is known before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...formats.gguf.layout import FileLayout
from ...formats.source import TensorInfo
from ...formats.types import GGMLType
from ...formats.values import Value
from .budget import candidates, is_free
from .plan import PlannedTensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SizeRange:
    """The smallest and the largest result that a choice of types has: bytes of all tensors, bytes
    of the file, and the number of weights.
    """

    tensors: tuple[int, int]
    files: tuple[int, int]
    n_elements: int

    @property
    def bits_per_weight(self) -> tuple[float, float]:
        """The least and the most bits per weight."""
        least, most = (8 * n_bytes / self.n_elements for n_bytes in self.tensors)
        return least, most

    def check(self, n_bytes: int | None, bpw: float | None) -> None:
        """Raise UsageError if a file of `n_bytes`, or `bpw` bits per weight, cannot be reached. A
        target above the largest result is a warning.
        """
        if n_bytes is None:
            wanted, (least, most) = bpw or 0.0, self.bits_per_weight
            shown = "%.4f bits per weight"
        else:
            wanted, (least, most) = float(n_bytes), self.files
            shown = "%.0f bytes"
        if not wanted >= least:
            raise UsageError(
                f"the smallest possible result has {shown % least}, but the target is"
                f" {shown % wanted}"
            )
        if wanted > most:
            log.warning(
                "the target is %s, but the largest possible result has %s",
                shown % wanted,
                shown % most,
            )


def size_range(
    draft: Sequence[PlannedTensor],
    types: Sequence[GGMLType],
    chosen_by_user: bool,
    metadata: dict[str, Value],
) -> SizeRange:
    """Return the range of the results that `fit_types` has for a draft, if there are importances
    for every tensor.
    """
    ends: list[list[TensorInfo]] = [[], []]
    for plan in draft:
        own = [plan.target]
        if is_free(plan):
            own = [
                plan.target.with_type(type)
                for type in candidates(plan.source, True, types, chosen_by_user)
            ]
        own.sort(key=lambda tensor: tensor.n_bytes)
        ends[0].append(own[0])
        ends[1].append(own[-1])
    least, most = (sum(tensor.n_bytes for tensor in tensors) for tensors in ends)
    files = [FileLayout("", metadata, tensors).n_bytes for tensors in ends]
    n_elements = sum(plan.target.n_elements for plan in draft)
    return SizeRange((least, most), (files[0], files[1]), n_elements)
