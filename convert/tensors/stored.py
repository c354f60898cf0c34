"""Tensors as a file stores them: dtype, shape and position. All readers and row classes use
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ...formats.types import TYPES

MAX_DIMENSIONS = 32

# Bits of one element. Sub-byte types are packed: their tensors must fill whole bytes.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Stored dtypes that are ggml types.
FLOAT_DTYPES = {"F32": TYPES["F32"], "F16": TYPES["F16"], "BF16": TYPES["BF16"]}
# Stored dtypes that become F32 when rows are read, with numpy's names. 8-bit integers are not
# among them: they are packed weights.
WIDENED_DTYPES = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, between the absolute byte positions `begin` and `end`.

    Elements follow each other in row order, unless there are `strides` (in elements, as PyTorch
    files may have them).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def n_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """The size of its elements in bytes."""
        return self.n_elements * DTYPE_BITS[self.dtype] // 8


class TensorReader(Protocol):
    """Read the bytes of stored tensors."""

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Return bytes `start` to `stop` of the tensor in row order, uint8[stop - start]. Callers
        request whole elements. The array may be read-only.
        """
        ...

    def release(self, tensor: StoredTensor) -> None:
        """Release the memory held for this tensor. It can be read again later."""
        ...


class TensorRows(Protocol):
    """`n_rows` rows of `row_bytes` bytes, computed from stored tensors when they are read."""

    n_rows: int
    row_bytes: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]. The array may be read-only."""
        ...

    def release(self) -> None:
        """Release the memory that reading has used."""
        ...
