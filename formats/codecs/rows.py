"""Rows of bytes of a type: checks of their shape, and work on pieces of them by several threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import ShapeError
from ..types import GGMLType


def checked_rows(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Return rows of a type as a contiguous uint8[rows, row_bytes]. Raise ShapeError for bytes that
    do not fit `n_cols` elements, or for a part of a row group.
    """
    row_bytes, data = type.row_bytes(n_cols), np.asarray(data)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != row_bytes:
        raise ShapeError(
            f"{type.name} rows of {n_cols} elements are uint8[rows, {row_bytes}], got"
            f" {data.dtype}{list(data.shape)}"
        )
    check_group(type, len(data))
    return np.ascontiguousarray(data)


def check_group(type: GGMLType, rows: int) -> None:
    """Raise ShapeError if `rows` are not whole row groups of an interleaved type."""
    if rows % type.group_rows:
        raise ShapeError(
            f"{rows} rows are not a multiple of {type.group_rows}, the row group of {type.name}"
        )


def in_pieces(work: Callable[[slice], None], rows: int, group_rows: int, threads: int) -> None:
    """Call `work` with slices of whole row groups that cover `rows` rows, on at most four threads
    per core.

    `work` must not call this again: it would wait for threads that wait for it.
    """
    if threads <= 1 or rows < 2 * group_rows:
        work(slice(0, rows))
        return
    step = -(-rows // threads // group_rows) * group_rows
    list(
        _pool(os.getpid(), min(threads, 4 * (os.cpu_count() or 1))).map(
            lambda at: work(slice(at, min(at + step, rows))), range(0, rows, step)
        )
    )


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads that is kept, as a model decodes thousands of matrices a second. A
    forked child gets its own.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="decode")
