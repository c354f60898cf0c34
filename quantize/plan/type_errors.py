"""Measured errors of types on tensors, by which types are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...formats.source import TensorInfo
from ...formats.types import GGMLType


@dataclass(frozen=True)
class ErrorSums:
    """Sums over some rows of one type: e is the error, x the source, w the importance of the column
    (1 without importances).
    """

    type: GGMLType
    n_elements: int = 0
    n_bytes: int = 0
    e2: float = 0.0
    x2: float = 0.0
    we2: float = 0.0
    wx2: float = 0.0
    largest_error: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            self.type,
            self.n_elements + other.n_elements,
            self.n_bytes + other.n_bytes,
            self.e2 + other.e2,
            self.x2 + other.x2,
            self.we2 + other.we2,
            self.wx2 + other.wx2,
            max(self.largest_error, other.largest_error),
        )

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including row headers."""
        return 8 * self.n_bytes / max(1, self.n_elements)

    @property
    def rmse(self) -> float:
        """Root mean square error, in units of the weights."""
        return math.sqrt(self.e2 / max(1, self.n_elements))

    @property
    def relative_rmse(self) -> float:
        """Root mean square error divided by the root mean square of the source."""
        return math.sqrt(self.e2 / self.x2) if self.x2 > 0 else 0.0

    @property
    def weighted_rmse(self) -> float:
        """sqrt(sum w e^2 / sum w x^2): relative, with each column weighted by its importance."""
        return math.sqrt(self.we2 / self.wx2) if self.wx2 > 0 else 0.0

    def figures(self, weighted: bool) -> dict[str, object]:
        """Return the figures for JSON. `weighted_rmse` is None unless `weighted`."""
        return {
            "type": self.type.name,
            "bits_per_weight": self.bits_per_weight,
            "rmse": self.rmse,
            "relative_rmse": self.relative_rmse,
            "weighted_rmse": self.weighted_rmse if weighted else None,
            "largest_error": self.largest_error,
        }


@dataclass
class TensorStats:
    """Errors of one tensor by type name, without types that its rows cannot have. `rows` of its
    `tensor.n_rows` rows were measured.
    """

    tensor: TensorInfo
    rows: int
    weighted: bool
    errors: dict[str, ErrorSums]


def fits(type: GGMLType, tensor: TensorInfo) -> bool:
    """Return whether the tensor's row length and row count allow the type."""
    return (
        tensor.n_cols % type.row_multiple == 0
        and (tensor.shape[-2] if len(tensor.shape) > 1 else 1) % type.group_rows == 0
    )
