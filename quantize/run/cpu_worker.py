"""Quantize pieces of tensors on the CPU: read, decode, encode and measure."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from ...errors import NonFiniteError
from ...formats.codecs.codec import decode
from ...formats.source import Source
from ..encode import refuse_non_finite, zero_non_finite
from .piece import Piece, PieceResult, PieceTask

# Largest magnitude that certainly fits when nothing is measured: scales are F16, and no scale is
# more than a few times the largest value it covers.
_SURELY_FITS = {"F16": 65504.0, "BF16": 3e38, "F32": float("inf")}
_SURELY_FITS_QUANTIZED = 8192.0


def work(
    source: Source, piece: Piece, measure: bool = True, reading: Future | None = None
) -> list[PieceResult]:
    """Return a result for every task of a piece. `reading` gives its rows if they are being read
    already.

    Nothing is measured for bytes that are kept. Without `measure`, errors are measured only where
    values might not fit into the target type.
    """
    info = piece.source
    rows = source.read_rows(info, piece.start, piece.stop) if reading is None else reading.result()
    if piece.kept:
        return [(_kept_bytes(source, piece, rows), None)] * len(piece.tasks)
    some_kept = any(task.encode is None for task in piece.tasks)
    kept = _kept_bytes(source, piece, rows) if some_kept else np.empty(0, dtype=np.uint8)
    x = decode(info.type, rows, info.n_cols)
    del rows
    changed = [task.planned for task in piece.tasks if not task.target.kept]
    zeroed = zero_non_finite(x) if any(planned.nan_to_zero for planned in changed) else 0
    largest = 0.0 if measure or zeroed else _largest(x)
    checked = False
    results: list[PieceResult] = []
    for task in piece.tasks:
        target = task.planned.target.type
        if task.encode is None:
            results.append((kept, None))
            continue
        limit = _SURELY_FITS.get(target.name, _SURELY_FITS_QUANTIZED)
        if not measure and not zeroed and largest <= limit:
            results.append((task.encode(x), None))
            continue
        if not target.is_float and not checked:
            first_row = piece.start % (info.n_rows // info.n_matrices)
            refuse_non_finite(x, info.name, source.path, first_row=first_row)
            checked = True
        results.append(_measured(task, task.encode(x), x, zeroed, source.path))
    return results


def _largest(x: np.ndarray) -> float:
    """Return the largest magnitude, or NaN, which fails every comparison, if x holds one."""
    return float(max(x.max(), -x.min())) if x.size else float("nan")


def _kept_bytes(source: Source, piece: Piece, rows: np.ndarray) -> np.ndarray:
    info = piece.source
    if info.type.tail_bytes and piece.stop == info.n_rows:
        tail = source.read_bytes(info, info.n_bytes - info.type.tail_bytes, info.n_bytes)
        return np.concatenate([rows.reshape(-1), tail])
    return np.array(rows)


def _measured(
    task: PieceTask, data: np.ndarray, x: np.ndarray, zeroed: int, file: str
) -> PieceResult:
    info, target = task.planned.source, task.planned.target.type
    sums = error_sums(x, decode(target, data, info.n_cols, as_weights=True), task.weights)
    if not np.isfinite(sums[4]) and np.isfinite(x).all():
        raise NonFiniteError(
            f"values up to {np.abs(x).max():g} do not fit into {target}",
            tensor=info.name,
            file=file,
        )
    return data, np.array([*sums, zeroed])


def error_sums(x: np.ndarray, made: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return float64[5]: sum e^2, sum x^2, sum w e^2, sum w x^2, max |e| of e = x - made.

    x, made: float32[rows, n_cols]. `made` is overwritten with e.
    """
    # Tensors that become floats keep values that are not finite; their errors are NaN.
    with np.errstate(invalid="ignore"):
        error = np.subtract(x, made, out=made)
    largest = float(np.abs(error).max(initial=0))
    e2, x2 = _column_squares(error), _column_squares(x)
    w = np.ones(x.shape[1]) if weights is None else weights.astype(np.float64)
    return np.array([e2.sum(), x2.sum(), (w * e2).sum(), (w * x2).sum(), largest])


def _column_squares(x: np.ndarray) -> np.ndarray:
    """Return sums of squares by column, float64[n_cols]. They are added in float32, which loses
    nothing that matters here, unless that overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.einsum("ij,ij->j", x, x)
        if np.isfinite(sums).all():
            return sums.astype(np.float64)
        return np.einsum("ij,ij->j", x, x, dtype=np.float64)
