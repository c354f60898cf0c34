"""The most probable tokens, on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from ..simd.operations import operation, packed
from ..simd.step import choice
from ..simd.threads import Program, run

MOST = 1024  # more are found faster by sorting all


class Largest:
    """Finds the largest logits."""

    def __init__(self) -> None:
        self._size = 0, 0

    def ask(self) -> None:
        """Ask for the operation."""
        operation(choice.largest)

    def __call__(self, logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the k largest of logits float32[n] and their places, descending, the first place
        first among equals. None if they are not finite, for all of them (k = 0), and for more than
        `MOST`.
        """
        n = len(logits)
        if not 0 < k <= min(n, MOST) or logits.dtype != torch.float32 or not logits.is_contiguous():
            return None
        if self._size != (n, k):
            self._prepare(n, k)
        self._arguments[0] = logits.data_ptr()
        run(self._program, 1)
        return None if self._proof[0] else (self._values.copy(), self._places.copy())

    def _prepare(self, n: int, k: int) -> None:
        self._values, self._places = np.empty(k, np.float32), np.empty(k, np.int64)
        self._proof = np.empty(1, np.float32)
        arrays = self._values, self._places, self._proof
        self._arguments = packed(0, n, k, *(array.ctypes.data for array in arrays))
        self._program = Program([(operation(choice.largest), self._arguments)])
        self._size = n, k
