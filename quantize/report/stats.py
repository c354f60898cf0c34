"""Measure the error of each type on each tensor: rows are quantized, decoded and compared in
pieces. Nothing is written.

The figures are those of the weights that matrix products use. Pieces and the order in which their
sums are added depend on the model and the options alone, so the figures are the same for any number
of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from ...errors import IqforgeError, UnsupportedTypeError, UsageError
from ...formats.codecs.codec import decode, encode_float
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType, ggml_type
from ..encode import arrange_rows, refuse_non_finite, row_encoder
from ..plan.overrides import regular_expressions
from ..plan.roles import is_candidate
from ..plan.type_errors import ErrorSums, TensorStats, fits
from ..run.compilation import compile_ahead
from ..run.compile_task import CompileProgress, CompileTask
from ..run.parallel import results_in_order, thread_count
from ..run.piece import ImportanceLookup

PIECE_ELEMENTS = 1 << 19
_RELEASE_ELEMENTS = 1 << 25  # pages of the source are released after so much reading
GROUP_ROWS = 16  # rows are sampled in such groups: every row group of a type divides it


@dataclass
class StatsReport:
    """Figures of all tensors. `sampled`: the requested rows per tensor, 0 for all."""

    model: str
    types: list[GGMLType]
    sampled: int = 0
    imatrix: str | None = None
    files: tuple[str, ...] = ()  # of the model
    tensors: list[TensorStats] = field(default_factory=list)

    @property
    def weighted(self) -> bool:
        """Return whether importances of any tensor were known."""
        return any(tensor.weighted for tensor in self.tensors)

    def total(self, type: GGMLType) -> ErrorSums:
        """Return the total over all tensors that can have the type."""
        return sum(
            (tensor.errors[type.name] for tensor in self.tensors if type.name in tensor.errors),
            ErrorSums(type),
        )

    def as_dict(self) -> dict[str, object]:
        """Return the report for JSON."""
        tensors = [
            {
                "name": t.tensor.name,
                "shape": list(t.tensor.shape),
                "source_type": t.tensor.type.name,
                "rows": t.rows,
                "errors": [sums.figures(t.weighted) for sums in t.errors.values()],
            }
            for t in self.tensors
        ]
        return {
            "model": self.model,
            "imatrix": self.imatrix,
            "rows_per_tensor": self.sampled or None,
            "tensors": tensors,
            "total": [self.total(type).figures(self.weighted) for type in self.types],
        }


class StatsProgress(CompileProgress):
    """Callbacks of `collect_stats`. This base class ignores them all."""

    def begin(self, tensors: Sequence[TensorInfo], n_elements: int) -> None: ...

    def advance(self, n_elements: int) -> None: ...

    def tensor_done(self, stats: TensorStats) -> None: ...


def collect_stats(
    source: Source,
    tensors: Sequence[TensorInfo],
    types: Sequence[GGMLType],
    report: StatsReport,
    *,
    importance: ImportanceLookup | None = None,
    threads: int = 0,
    progress: StatsProgress | None = None,
) -> StatsReport:
    """Measure every type on every tensor and add the results to `report`, whose `sampled` says how
    many rows.

    Interleaved types have the values of their plain types, and the same errors. Raise
    NonFiniteError naming the first NaN or infinity.
    """
    progress = progress or StatsProgress()
    compile_ahead(_tasks(tensors, types, importance), progress)
    threads = thread_count(threads)
    spans = [list(row_spans(tensor, report.sampled)) for tensor in tensors]
    progress.begin(
        tensors,
        sum(
            tensor.n_cols * sum(stop - start for start, stop in own)
            for tensor, own in zip(tensors, spans)
        ),
    )
    with ThreadPoolExecutor(threads, thread_name_prefix="stats") as pool:
        for tensor, own in zip(tensors, spans):
            weights = None if importance is None else importance(tensor.name, tensor.shape)
            fitting = [type for type in types if fits(type, tensor)]
            errors = {type.name: ErrorSums(type) for type in fitting}
            n_read = 0
            with closing(
                results_in_order(pool, 2 * threads, _works(source, tensor, own, fitting, weights))
            ) as results:
                for n_elements, measured in results:
                    for sums in measured:
                        errors[sums.type.name] += sums
                    progress.advance(n_elements)
                    n_read += n_elements
                    if n_read >= _RELEASE_ELEMENTS:
                        source.release(tensor)
                        n_read = 0
            source.release(tensor)
            report.tensors.append(
                TensorStats(
                    tensor, sum(stop - start for start, stop in own), weights is not None, errors
                )
            )
            progress.tensor_done(report.tensors[-1])
    return report


def _tasks(
    tensors: Sequence[TensorInfo], types: Sequence[GGMLType], importance: ImportanceLookup | None
) -> list[CompileTask]:
    weighted = {
        importance is not None and importance(tensor.name, tensor.shape) is not None
        for tensor in tensors
    }
    plain = [type.base or type.name for type in types if any(fits(type, t) for t in tensors)]
    tasks = [CompileTask("decode", tensor.type.name) for tensor in tensors]
    for name in plain:
        tasks += [CompileTask("search", name, own) for own in weighted]
        tasks.append(CompileTask("decode", name, as_weights=True))
    return list(dict.fromkeys(tasks))


def choose_types(asked: Sequence[GGMLType], encodable: Sequence[str]) -> list[GGMLType]:
    """Return the types asked for, each once, by bits per weight; by default every quantized type
    that is not the interleaved form of another.

    Raise UnsupportedTypeError for a type without a search.
    """
    for type in asked:
        if type.name not in encodable:
            raise UnsupportedTypeError(f"there is no quantizer for {type.name}")
    chosen = set(asked) or {
        type for type in map(ggml_type, encodable) if type.is_quantized and not type.base
    }
    return sorted(chosen, key=lambda type: (type.bits_per_weight, type.id))


def choose_tensors(
    source: Source, include: Sequence[str], decodable: Sequence[str]
) -> list[TensorInfo]:
    """Return the tensors that a quantization run may change and whose names match one of the
    regular expressions. Raise UsageError if none is left.
    """
    matchers = regular_expressions(include)
    chosen = [
        tensor
        for tensor in source.tensors
        if is_candidate(tensor)
        and tensor.type.name in decodable
        and (not matchers or any(matcher.search(tensor.name) for matcher in matchers))
    ]
    if not chosen:
        raise UsageError(
            "no tensor to measure"
            + (f" has a name with {' or '.join(include)} in it" if include else ""),
            file=source.path,
        )
    return chosen


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


def _works(
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
            try:
                encoders = [(type, encoder_of(type, tensor.n_cols, importance)) for type in types]
            except IqforgeError as error:
                raise error.__class__(error.message, file=source.path, tensor=tensor.name) from None

        def work(
            start=start, stop=stop, encoders=encoders, importance=importance
        ) -> list[ErrorSums]:
            x = decode(tensor.type, source.read_rows(tensor, start, stop), tensor.n_cols)
            refuse_non_finite(x, tensor.name, source.path, first_row=start % matrix_rows)
            return [measure_rows(type, x, encode(x), importance) for type, encode in encoders]

        yield (stop - start) * tensor.n_cols, work


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
