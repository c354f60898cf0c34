"""Rearranged rows equal numpy's result on the whole array, for every range of rows, and read no
more than they need.
"""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.convert.tensors.mxfp4 import MXFP4Rows
from iqforge.convert.tensors.reorder import (
    ComputedRows,
    EveryOtherRow,
    SelectedColumns,
    SelectedRows,
    TransposedHeads,
    TransposedMatrices,
)
from iqforge.errors import UnsupportedTypeError
from iqforge.formats.types import TYPES


class ArrayRows:
    """An array as `Rows` that remembers how many rows were read."""

    def __init__(self, array: np.ndarray):
        self._data = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
        self.n_rows, self.row_bytes = self._data.shape
        self.n_read = 0

    def read(self, start: int, stop: int) -> np.ndarray:
        self.n_read += stop - start
        return self._data[start:stop]

    def release(self) -> None:
        pass


def check(rows, expected: np.ndarray) -> None:
    expected = np.ascontiguousarray(expected).view(np.uint8).reshape(len(expected), -1)
    assert (rows.n_rows, rows.row_bytes) == expected.shape
    for start in range(rows.n_rows + 1):
        for stop in (start, min(start + 1, rows.n_rows), min(start + 5, rows.n_rows), rows.n_rows):
            assert np.array_equal(rows.read(start, stop), expected[start:stop])


@pytest.mark.parametrize("dtype, name", [(np.float32, "F32"), (np.uint16, "BF16")])
def test_heads_transposed_and_selected(dtype: type, name: str):
    heads, nope, value, rank = 3, 4, 2, 5
    array = (
        np.arange(heads * (nope + value) * rank).astype(dtype).reshape(heads * (nope + value), rank)
    )
    per_head = array.reshape(heads, nope + value, rank)
    check(
        TransposedHeads(ArrayRows(array), heads, nope + value, nope, TYPES[name]),
        per_head[:, :nope].transpose(0, 2, 1).reshape(heads * rank, nope),
    )
    order = np.array([5, 4, 9, 10, 11, 0])
    check(SelectedRows(ArrayRows(array), order), array[order])
    check(SelectedColumns(ArrayRows(array), np.array([4, 0, 2]), TYPES[name]), array[:, [4, 0, 2]])


@pytest.mark.parametrize("dtype, name", [(np.float32, "F32"), (np.uint16, "F16")])
@pytest.mark.parametrize("columns", [slice(None), slice(0, None, 2), slice(1, None, 2)])
def test_matrices_transposed(dtype: type, name: str, columns: slice):
    array = np.arange(2 * 35 * 6).astype(dtype).reshape(2, 35, 6)
    check(
        TransposedMatrices(ArrayRows(array.reshape(70, 6)), 2, TYPES[name], columns),
        array[:, :, columns].transpose(0, 2, 1).reshape(-1, 35),
    )


def test_every_other_row():
    array = np.arange(24, dtype=np.uint8).reshape(8, 3)
    check(EveryOtherRow(ArrayRows(array), 0), array[::2])
    check(EveryOtherRow(ArrayRows(array), 1), array[1::2])


def test_mxfp4_keeps_codes_and_exponents():
    random = np.random.default_rng(1)
    codes, exponents = (
        random.integers(0, 16, (5, 3, 32), np.uint8),
        random.integers(0, 256, (5, 3), np.uint8),
    )
    stored = codes[..., ::2] | codes[..., 1::2] << 4
    block = np.concatenate([exponents[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=2)
    check(MXFP4Rows(ArrayRows(stored.reshape(5, 48)), ArrayRows(exponents)), block.reshape(5, 51))


def test_computed():
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    check(
        ComputedRows(
            ArrayRows((array.view(np.uint32) >> 16).astype(np.uint16)),
            TYPES["BF16"],
            3,
            lambda x: -x,
        ),
        -array,
    )


def test_only_the_head_of_a_row_is_read():
    base = ArrayRows(np.zeros((12 * 6, 8), np.float32))
    TransposedHeads(base, 12, 6, 4, TYPES["F32"]).read(17, 18)
    assert base.n_read == 4


def test_blocks_cannot_be_rearranged():
    rows = ArrayRows(np.zeros((4, 34), np.uint8))
    for make in (
        lambda: TransposedHeads(rows, 2, 2, 1, TYPES["Q8_0"]),
        lambda: SelectedColumns(rows, np.arange(1), TYPES["Q8_0"]),
        lambda: TransposedMatrices(rows, 2, TYPES["Q8_0"]),
    ):
        with pytest.raises(UnsupportedTypeError, match="Q8_0"):
            make()
