"""Measure the error of each type on each tensor: rows are quantized, decoded and compared in
pieces. Nothing is written. `device_stats` does it on GPUs.

The figures are those of the weights that matrix products use. Pieces and the order in which their
sums are added depend on the model and the options alone, so the figures are the same for any number
of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from ...errors import UnsupportedTypeError, UsageError
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType, ggml_type
from ..plan.overrides import regular_expressions
from ..plan.roles import is_candidate
from ..plan.type_errors import ErrorSums, TensorStats, fits
from ..run.compilation import compile_ahead
from ..run.compile_task import CompileProgress, CompileTask
from ..run.cuda_worker import device_workers
from ..run.parallel import results_in_order, thread_count
from ..run.piece import ImportanceLookup, plain_type
from .device_stats import DeviceMeasurements
from .row_errors import row_spans, works


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

    def begin(self, tensors: Sequence[TensorInfo], n_elements: int) -> None:
        """Called once with the tensors to measure and their elements in total."""

    def advance(self, n_elements: int) -> None:
        """Called when `n_elements` more elements are measured, for all types."""

    def tensor_done(self, stats: TensorStats) -> None:
        """Called with the errors of a tensor when all of its types are measured."""


def collect_stats(
    source: Source,
    tensors: Sequence[TensorInfo],
    types: Sequence[GGMLType],
    report: StatsReport,
    *,
    importance: ImportanceLookup | None = None,
    threads: int = 0,
    devices: Sequence[int] = (),
    progress: StatsProgress | None = None,
) -> StatsReport:
    """Measure every type on every tensor and add the results to `report`, whose `sampled` says how
    many rows.

    Interleaved types have the values of their plain types, and the same errors. devices: numbers of
    GPUs that measure, see `device_stats`. Raise NonFiniteError naming the first NaN or infinity.
    """
    progress = progress or StatsProgress()
    on_cpu = [type for type in types if not devices or plain_type(type).is_float]
    compile_ahead(tasks_of_stats(tensors, on_cpu, importance), progress)
    threads = thread_count(threads)
    spans = [list(row_spans(tensor, report.sampled)) for tensor in tensors]
    progress.begin(
        tensors,
        sum(
            tensor.n_cols * sum(stop - start for start, stop in own)
            for tensor, own in zip(tensors, spans)
        ),
    )
    with ExitStack() as opened:
        there = ahead = None
        if devices:
            there = DeviceMeasurements(opened.enter_context(device_workers(devices, threads)))
            threads = ahead = len(there.workers.slots)
        pool = opened.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="stats"))
        for tensor, own in zip(tensors, spans):
            weights = None if importance is None else importance(tensor.name, tensor.shape)
            fitting = [type for type in types if fits(type, tensor)]
            errors = {type.name: ErrorSums(type) for type in fitting}
            with closing(
                results_in_order(
                    pool,
                    ahead or 2 * threads,
                    works(source, tensor, own, fitting, weights)
                    if there is None
                    else there.works(source, tensor, own, fitting, weights),
                )
            ) as results:
                for n_elements, measured in results:
                    for sums in measured:
                        errors[sums.type.name] += sums
                    progress.advance(n_elements)
            source.release(tensor)
            report.tensors.append(
                TensorStats(
                    tensor, sum(stop - start for start, stop in own), weights is not None, errors
                )
            )
            progress.tensor_done(report.tensors[-1])
    return report


def measured_elements(
    tensors: Sequence[TensorInfo], types: Sequence[GGMLType], sampled: int
) -> int:
    """Return how many elements `collect_stats` quantizes, of all types together."""
    return sum(
        tensor.n_cols * min(sampled or tensor.n_rows, tensor.n_rows) * len(types)
        for tensor in tensors
    )


def tasks_of_stats(
    tensors: Sequence[TensorInfo], types: Sequence[GGMLType], importance: ImportanceLookup | None
) -> list[CompileTask]:
    """Return the tasks of measuring these types on the CPU."""
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
