"""Store one tensor in another type, in memory, to measure how sensitive a model is to its error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from ...errors import UsageError
from ...formats.codecs.codec import decode
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType, ggml_type
from ..encode import refuse_non_finite
from ..plan.roles import is_candidate
from ..plan.type_errors import ErrorSums, fits
from ..run.parallel import results_in_order, thread_count
from .row_errors import encoder_of, measure_rows, row_spans

# Types to store tensors in: their errors are small enough to add up, and far above the errors of
# float32.
PROBE_TYPES = ("IQ3_K", "IQ4_NL")


def probe_type(tensor: TensorInfo, types: Sequence[str] = PROBE_TYPES) -> GGMLType:
    """Return the first of the types that the tensor's rows can have. Raise UsageError if there is
    none, or one needs whole row groups.
    """
    found = next(
        (
            type
            for type in map(ggml_type, types)
            if type.is_quantized and not type.is_interleaved and fits(type, tensor)
        ),
        None,
    )
    if found is None:
        raise UsageError(
            f"none of {', '.join(types)} is a plain quantized type for rows of {tensor.n_cols}",
            tensor=tensor.name,
        )
    return found


def probe_groups(
    tensors: Sequence[TensorInfo], architecture: str, layers: int = 1
) -> list[list[TensorInfo]]:
    """Return groups of tensors that are stored in another type together: of one role, in `layers`
    consecutive layers.
    """
    groups: dict[tuple[str, int], list[TensorInfo]] = {}
    for tensor in tensors:
        if is_candidate(tensor, architecture):
            name = TensorName.parse(tensor.name)
            groups.setdefault((name.local, (name.layer or 0) // layers), []).append(tensor)
    return list(groups.values())


def encode_tensor(
    source: Source,
    tensor: TensorInfo,
    type: GGMLType,
    importance: np.ndarray | None,
    out: np.ndarray,
    threads: int = 0,
) -> ErrorSums:
    """Write blocks of a plain `type` to `out`, uint8[n_rows, row_bytes]. Return the errors.

    importance: float32[n_matrices, n_cols] or None. The errors are those of `stats.collect_stats`.
    """
    threads, total = thread_count(threads), ErrorSums(type)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="probe") as pool,
        closing(
            results_in_order(pool, 2 * threads, _works(source, tensor, type, importance))
        ) as results,
    ):
        for start, (data, sums) in results:
            out[start : start + len(data)] = data
            total += sums
    source.release(tensor)
    return total


def _works(
    source: Source, tensor: TensorInfo, type: GGMLType, importance: np.ndarray | None
) -> Iterator:
    matrix_rows = tensor.n_rows // tensor.n_matrices
    for start, stop in row_spans(tensor, 0):
        own = None if importance is None else importance[start // matrix_rows]

        def work(
            start=start, stop=stop, own=own, encode=encoder_of(type, tensor.n_cols, own)
        ) -> tuple[np.ndarray, ErrorSums]:
            x = decode(tensor.type, source.read_rows(tensor, start, stop), tensor.n_cols)
            refuse_non_finite(x, tensor.name, source.path, first_row=start % matrix_rows)
            data = encode(x)
            return data, measure_rows(type, x, data, own)

        yield start, work
