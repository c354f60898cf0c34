"""A few rows seen as many: the same memory mapped repeatedly, one mapping after the other.

A view of a thousand times the rows costs address space and no memory, and slices of it are ordinary
arrays.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

import numpy as np

from ...errors import IqforgeError

_PROT_READ, _MAP_SHARED, _MAP_FIXED = 1, 1, 16  # Linux


class RepeatedRows:
    """Rows 0, 1, ... n-1, 0, 1, ... of `rows` uint8[n, row_bytes], at least `n_rows` of them, as
    `.view` uint8[>= n_rows, row_bytes].

    n * row_bytes must be a multiple of the page size; `rows_per_page_run` gives the least n for
    which it is.
    """

    def __init__(self, rows: np.ndarray, n_rows: int):
        rows = np.ascontiguousarray(rows)
        if rows.nbytes % mmap.PAGESIZE:
            raise ValueError(f"{rows.nbytes} bytes are not a multiple of {mmap.PAGESIZE}")
        times = -(-n_rows // len(rows))
        handle = os.memfd_create("iqforge-rows")
        try:
            os.truncate(handle, rows.nbytes)
            with mmap.mmap(handle, rows.nbytes) as once:
                once.write(rows.data.cast("B"))
            self._region = mmap.mmap(
                -1,
                times * rows.nbytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                prot=mmap.PROT_READ,
            )
            first = np.frombuffer(self._region, np.uint8).ctypes.data
            for k in range(times):
                _map_over(first + k * rows.nbytes, rows.nbytes, handle)
        finally:
            os.close(handle)  # the mappings keep the memory
        self.view = np.frombuffer(self._region, np.uint8).reshape(-1, rows.shape[1])


def rows_per_page_run(row_bytes: int, group_rows: int = 1) -> int:
    """The least number of rows, whole groups, that fill whole pages."""
    return math.lcm(row_bytes * group_rows, mmap.PAGESIZE) // row_bytes


def _map_over(address: int, n_bytes: int, handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    if libc.mmap(address, n_bytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED, handle, 0) != address:
        raise IqforgeError(
            f"memory for random rows cannot be mapped: {os.strerror(ctypes.get_errno())}"
        )
