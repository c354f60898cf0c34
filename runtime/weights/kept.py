"""Matrices that are multiplied as they are stored, on the CPU.

The compiler of `simd` is imported when the first of them is used: a model on a GPU does not need
it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...formats.types import GGMLType

if TYPE_CHECKING:
    from ..simd.products import Rows

UNIT = 32  # weights that are decoded together
X_PLACE, Y_PLACE = 4, 7  # of the addresses among the arguments of a multiplication


@functools.cache
def _compiled():
    from ..simd import products, threads

    return products, threads


def can_be_kept(type: GGMLType, n_cols: int) -> bool:
    """Return whether rows of `n_cols` weights can be multiplied as they are stored."""
    return n_cols % UNIT == 0


def kept_rows(type: GGMLType, stored: np.ndarray, n_cols: int) -> Rows:
    """Return rows of `type`, uint8[rows, row_bytes], for products. Interleaved ones are copied one
    after the other, others are used where they are.
    """
    products, _ = _compiled()
    rows = np.ascontiguousarray(products.plain_rows(type, stored, n_cols))
    return products.Rows(products.plain_type(type), rows, n_cols)


def decoded(type: GGMLType, stored: np.ndarray, n_cols: int) -> torch.Tensor:
    """Return float32[rows, n_cols] of rows of `type`, uint8[rows, row_bytes]: the weights that
    products use.
    """
    _, threads = _compiled()
    rows = kept_rows(type, stored, n_cols)
    out = torch.empty(len(rows.data), n_cols)
    threads.run(threads.Program([rows.decoding(out.data_ptr())]), torch.get_num_threads())
    return out


class Multiplication:
    """Products of rows start..stop of `whole` with rows x, one by one."""

    def __init__(self, whole: Rows, start: int, stop: int):
        _, threads = _compiled()
        self.whole, self.rows = whole, whole.part(start, stop)
        operation, self._arguments = self.rows.multiplication(0, 0)
        self._program, self._run = threads.Program([(operation, self._arguments)]), threads.run

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[n, columns] to float32[n, rows]."""
        x = x.contiguous()
        y = x.new_empty(len(x), len(self.rows.data))
        at, to = x.data_ptr(), y.data_ptr()
        for i in range(len(x)):
            self._arguments[X_PLACE] = at + 4 * i * x.shape[1]
            self._arguments[Y_PLACE] = to + 4 * i * y.shape[1]
            self._run(self._program, torch.get_num_threads())
        return y
