"""Measure the errors of types on rows of a tensor on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...errors import IqforgeError
from ...formats.codecs.codec import decode, encode_float
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType, ggml_type
from ..encode import arrange_rows, refuse_non_finite, row_encoder
from ..plan.type_errors import ErrorSums

PIECE_ELEMENTS = 1 << 19
GROUP_ROWS = 16  # rows are sampled in such groups: every row group of a type divides it

Span = tuple[int, int]  # first row of a tensor and the row after the last
Encoders = Sequence[tuple[GGMLType, Callable[[np.ndarray], np.ndarray]]]


def row_spans(tensor: TensorInfo, sampled: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the rows to measure, each within a matrix: all, or groups of rows,
    evenly spaced, about `sampled` rows in all.
    """
    matrix_rows = tensor.n_rows // tensor.n_matrices
    some = 0 < sampled < tensor.n_rows
    step = (
        GROUP_ROWS if some else max(1, PIECE_ELEMENTS // (tensor.n_cols * GROUP_ROWS)) * GROUP_ROWS
    )
    per_matrix = -(-matrix_rows // step)
    total = per_matrix * tensor.n_matrices
    wanted = min(total, -(-sampled // GROUP_ROWS)) if some else total
    for n in range(wanted):
        matrix, group = divmod((2 * n + 1) * total // (2 * wanted), per_matrix)
        start = matrix * matrix_rows + group * step
        yield start, min(start + step, (matrix + 1) * matrix_rows)


def works(
    source: Source,
    tensor: TensorInfo,
    spans: Sequence[tuple[int, int]],
    types: Sequence[GGMLType],
    weights: np.ndarray | None,
) -> Iterator[tuple[int, Callable[[], list[ErrorSums]]]]:
    """Yield (number of elements, function that measures them) for each span."""
    matrix_rows, last = tensor.n_rows // tensor.n_matrices, None
    for start, stop in spans:
        if start // matrix_rows != last:
            last = start // matrix_rows
            importance = None if weights is None else weights[last]
            encoders = encoders_of(source, tensor, types, importance)

        def work(
            start=start, stop=stop, encoders=encoders, importance=importance
        ) -> list[ErrorSums]:
            return measure_span(source, tensor, start, stop, encoders, importance)

        yield (stop - start) * tensor.n_cols, work


def encoders_of(
    source: Source, tensor: TensorInfo, types: Sequence[GGMLType], importance: np.ndarray | None
) -> Encoders:
    """Return the encoder of each type. Errors name the tensor."""
    try:
        return [(type, encoder_of(type, tensor.n_cols, importance)) for type in types]
    except IqforgeError as error:
        raise error.__class__(error.message, file=source.path, tensor=tensor.name) from None


def measure_span(
    source: Source,
    tensor: TensorInfo,
    start: int,
    stop: int,
    encoders: Encoders,
    importance: np.ndarray | None,
) -> list[ErrorSums]:
    """Return the errors of rows start..stop, which are of one matrix, for every encoder."""
    x = decode(tensor.type, source.read_rows(tensor, start, stop), tensor.n_cols)
    first_row = start % (tensor.n_rows // tensor.n_matrices)
    refuse_non_finite(x, tensor.name, source.path, first_row=first_row)
    return [measure_rows(type, x, encode(x), importance) for type, encode in encoders]


def encoder_of(
    type: GGMLType, n_cols: int, importance: np.ndarray | None
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from rows to bytes of the type, or of its plain type with equal values."""
    plain = ggml_type(type.base) if type.base else type
    if plain.is_float:
        return lambda x: encode_float(plain, x)
    run = row_encoder(type, n_cols, importance)

    def encode(x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), plain.row_bytes(n_cols)), dtype=np.uint8)
        run(x, out)
        return out if type.base else arrange_rows(type, out, n_cols)

    return encode


def measure_rows(
    type: GGMLType, x: np.ndarray, data: np.ndarray, importance: np.ndarray | None
) -> ErrorSums:
    """Return the errors of rows x float32[rows, n_cols] and what `encoder_of` the type made of
    them.
    """
    error = decode(ggml_type(type.base) if type.base else type, data, x.shape[1], as_weights=True)
    np.subtract(x, error, out=error)
    e2, x2 = (np.einsum("ij,ij->j", v, v, dtype=np.float64) for v in (error, x))
    w = np.ones(x.shape[1]) if importance is None else importance.astype(np.float64)
    return ErrorSums(
        type,
        x.size,
        len(x) * type.row_bytes(x.shape[1]),
        float(e2.sum()),
        float(x2.sum()),
        float((w * e2).sum()),
        float((w * x2).sum()),
        float(np.abs(error).max(initial=0)),
    )
