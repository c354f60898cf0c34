"""The unit of work of a run: some rows of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .plan import PlannedTensor


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a tensor, all of one matrix, or bytes to copy (encode is None).

    A piece for a GPU has a number, counted over the run, and no encode; it may span matrices, with weights[matrices, n_cols]."""

    index: int
    planned: PlannedTensor
    start: int
    stop: int
    weights: np.ndarray | None
    encode: Callable[[np.ndarray], np.ndarray] | None
    number: int | None = None

    @property
    def kept(self) -> bool:
        return self.planned.kept
