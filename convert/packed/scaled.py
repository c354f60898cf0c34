"""Codes times scales: the common form of quantized checkpoints, decoded to float32 rows on demand.

value[r, c] = (code[r, c] - zero[r', c']) * scale[r', c'] in float32, where r' and c' number the
blocks of rows and columns that share a scale. Blocks at the lower and right edge are cut short.
Stacked matrices do not share blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...errors import CheckpointError
from ...formats.codecs.codec import decode
from ...formats.types import TYPES
from ..checkpoint.folder import Checkpoint
from ..tensors.decoded import DecodedTensor, decoded
from ..tensors.stored import FLOAT_DTYPES, StoredTensor, TensorRows


def fp8_values(exponent_bits: int, bias: int, nan_codes: Sequence[int]) -> np.ndarray:
    """Return float32[256]: the values of an 8-bit float with sign, subnormals included."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent, mantissa = (
        codes >> mantissa_bits & (1 << exponent_bits) - 1,
        codes & (1 << mantissa_bits) - 1,
    )
    fraction = mantissa / 2.0**mantissa_bits
    values = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    values = np.where(codes & 128, -values, values)
    values[list(nan_codes)] = np.nan
    return values.astype(np.float32)


F8_E4M3 = fp8_values(4, 7, (0x7F, 0xFF))
# The upper byte of a float16, infinities included.
F8_E5M2 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
F8_E8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)


def _lookup(table: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function uint8[rows, n_cols] -> float32[rows, n_cols] that looks codes up in a table
    of 256; two at a time in rows of even length, which is twice as fast.
    """
    # The first code is the low byte.
    pairs = np.stack([np.tile(table, 256), np.repeat(table, 256)], axis=1).view(np.uint64).ravel()

    def values(codes: np.ndarray) -> np.ndarray:
        if codes.shape[1] % 2:
            return np.take(table, codes)
        return np.take(pairs, np.ascontiguousarray(codes).view("<u2")).view(np.float32)

    return values


# dtype of codes -> their values: uint8[rows, n_cols] -> float32[rows, n_cols]
CODES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F8_E4M3": _lookup(F8_E4M3),
    "F8_E5M2": _lookup(F8_E5M2),
    "I8": lambda codes: codes.view(np.int8).astype(np.float32),
}


def float_values(checkpoint: Checkpoint, tensor: StoredTensor) -> np.ndarray:
    """Return a small tensor of floats (scales) as float32 of its shape. Raise CheckpointError for
    another dtype.
    """
    raw = checkpoint.data(tensor)
    if tensor.dtype == "F8_E8M0":
        return F8_E8M0[raw].reshape(tensor.shape)
    if tensor.dtype == "F8_E4M3":
        return F8_E4M3[raw].reshape(tensor.shape)
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"has dtype {tensor.dtype}; scales are floats", file=tensor.file, tensor=tensor.name
        )
    if tensor.n_elements == 0:
        return np.empty(tensor.shape, np.float32)
    return decode(FLOAT_DTYPES[tensor.dtype], raw.reshape(1, -1), tensor.n_elements).reshape(
        tensor.shape
    )


def integers(checkpoint: Checkpoint, tensor: StoredTensor) -> np.ndarray:
    """Return a small tensor of integers (shapes, groups of columns). Raise CheckpointError for
    another dtype.
    """
    if tensor.dtype not in ("I32", "I64"):
        raise CheckpointError(
            f"has dtype {tensor.dtype}, expected integers", file=tensor.file, tensor=tensor.name
        )
    return (
        checkpoint.data(tensor)
        .view("<i4" if tensor.dtype == "I32" else "<i8")
        .reshape(tensor.shape)
    )


class CodeRows:
    """The bytes of a stored tensor as `n_rows` equal rows, whatever its dtype."""

    def __init__(self, checkpoint: Checkpoint, tensor: StoredTensor, n_rows: int):
        self.n_rows, self.row_bytes = n_rows, tensor.n_bytes // max(n_rows, 1)
        self._checkpoint, self._tensor = checkpoint, tensor

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._checkpoint.read(
            self._tensor, start * self.row_bytes, stop * self.row_bytes
        ).reshape(stop - start, self.row_bytes)

    def release(self) -> None:
        self._checkpoint.release(self._tensor)


class ScaledRows:
    """Rows of codes times their scales, as float32[n_rows, n_cols].

    `unpack` converts code rows to float32[rows, n_cols]. `scales()` returns float32[matrices *
    row_blocks, column_blocks], `zeros()` likewise, and `column_blocks()` the block of each column
    where blocks are not `block_cols` columns each. Results are kept until `release`: those of a
    whole model would take much memory.
    """

    def __init__(
        self,
        codes: TensorRows,
        n_cols: int,
        unpack: Callable[[np.ndarray], np.ndarray],
        scales: Callable[[], np.ndarray],
        *,
        matrix_rows: int,
        block_rows: int,
        block_cols: int,
        zeros: Callable[[], np.ndarray] | None = None,
        column_blocks: Callable[[], np.ndarray] | None = None,
    ):
        self.n_rows, self.row_bytes = codes.n_rows, 4 * n_cols
        self._codes, self._unpack, self._scales, self._zeros = codes, unpack, scales, zeros
        self._matrix_rows, self._block_rows, self._block_cols, self._column_blocks = (
            matrix_rows,
            block_rows,
            block_cols,
            column_blocks,
        )
        self._kept: dict[Callable, np.ndarray] = {}

    def read(self, start: int, stop: int) -> np.ndarray:
        values = self._unpack(self._codes.read(start, stop))
        matrix, row = np.divmod(np.arange(start, stop), self._matrix_rows)
        blocks = matrix * -(-self._matrix_rows // self._block_rows) + row // self._block_rows
        if self._zeros is not None:
            self._apply(np.subtract, values, self._kept_result(self._zeros)[blocks])
        self._apply(np.multiply, values, self._kept_result(self._scales)[blocks])
        return values.view(np.uint8).reshape(stop - start, self.row_bytes)

    def _apply(self, operation: np.ufunc, values: np.ndarray, of_rows: np.ndarray) -> None:
        """Compute values[r, c] = operation(values[r, c], of_rows[r, block of c]) in place."""
        rows, width, size = len(values), values.shape[1], self._block_cols
        if of_rows.shape[1] == 1:
            operation(values, of_rows, out=values)
        elif self._column_blocks is not None:
            operation(values, of_rows[:, self._kept_result(self._column_blocks)], out=values)
        elif width % size == 0:
            blocks = values.reshape(rows, -1, size)  # a view
            operation(blocks, of_rows[:, :, None], out=blocks)
        else:  # the last block is cut short
            operation(values, np.repeat(of_rows, size, axis=1)[:, :width], out=values)

    def _kept_result(self, make: Callable[[], np.ndarray]) -> np.ndarray:
        if (kept := self._kept.get(make)) is None:
            kept = self._kept[make] = make()
        return kept

    def release(self) -> None:
        self._kept.clear()
        self._codes.release()


def scaled(
    checkpoint: Checkpoint, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None
) -> DecodedTensor:
    """Return `weight` (dtypes of `CODES`, [..., rows, cols]) times `scale` as F32.

    With a block size, the scale is [..., row blocks, column blocks]. Without, it is broadcast: one
    per tensor, per matrix or per row. Raise CheckpointError for dtypes and shapes that do not fit.
    """
    if weight.dtype not in CODES or len(weight.shape) < 2 or weight.n_elements == 0:
        raise CheckpointError(
            f"has a scale, but is {weight.dtype} of shape {list(weight.shape)}",
            file=weight.file,
            tensor=weight.name,
        )
    *matrices, n_rows, n_cols = weight.shape
    if block is None or scale.n_elements == 1:
        block = (n_rows, n_cols)
        grid = broadcast_grid(weight, scale)
        if grid[-2] == n_rows:
            block = (1, n_cols)
    else:
        grid = (*matrices, -(-n_rows // block[0]), -(-n_cols // block[1]))
        if scale.shape != grid:
            raise unfit(scale, weight, f"{list(grid)} for blocks of {block[0]} x {block[1]}")

    def scales() -> np.ndarray:
        values = float_values(checkpoint, scale)
        if scale.shape != grid:
            values = np.broadcast_to(
                values.reshape(scale.shape + (1,) * (len(grid) - len(scale.shape))), grid
            )
        return values.reshape(-1, grid[-1])

    rows = ScaledRows(
        CodeRows(checkpoint, weight, weight.n_elements // n_cols),
        n_cols,
        CODES[weight.dtype],
        scales,
        matrix_rows=n_rows,
        block_rows=block[0],
        block_cols=block[1],
    )
    return decoded(weight, weight.name, weight.shape, TYPES["F32"], rows)


def broadcast_grid(weight: StoredTensor, scale: StoredTensor) -> tuple[int, ...]:
    """Return the shape [..., row blocks, 1] of a scale without block size. Missing dimensions are
    appended on the right. Raise CheckpointError for a shape that does not fit the weight.
    """
    *matrices, n_rows, _ = weight.shape
    per_matrix, per_row = (*matrices, 1, 1), (*matrices, n_rows, 1)
    if scale.n_elements == 1:
        return per_matrix
    shape = scale.shape + (1,) * (len(weight.shape) - len(scale.shape))
    if shape not in (per_matrix, per_row):
        raise unfit(scale, weight, f"one per tensor, {list(per_matrix)} or {list(per_row)}")
    return shape


def unfit(scale: StoredTensor, weight: StoredTensor, wanted: str) -> CheckpointError:
    """Return the error for a scale whose shape does not fit its weight. wanted: the shape that
    does.
    """
    return CheckpointError(
        f"has shape {list(scale.shape)}; {weight.name} of shape {list(weight.shape)} asks for"
        f" {wanted}",
        file=scale.file,
        tensor=scale.name,
    )
