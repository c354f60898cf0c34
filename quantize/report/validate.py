"""Read a quantized file back: every value must be finite, and every error must be the one that the
run reported.

Tensors are decoded in pieces of rows on several threads, together with the source if there is one.
Bytes that were kept must be equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from ...errors import ShapeError, ValidationError
from ...formats.codecs.codec import decodable_types, decode
from ...formats.gguf.reader import GGUFFile, SingleFile
from ...formats.source import Source, TensorInfo
from ..encode import zero_non_finite
from ..plan.plan import PlannedTensor
from ..run.cpu_worker import error_sums
from ..run.parallel import results_in_order
from ..run.piece import PIECE_ELEMENTS, ImportanceLookup
from ..run.report import Checked, ErrorTotals, RunProgress, TensorReport

TOLERANCE = 1e-5  # relative; sums are in another order on GPUs


@dataclass(frozen=True)
class _Comparison:
    """The data that a written tensor is compared with: its plan, the source and the importances."""

    plan: PlannedTensor
    source: Source
    weights: np.ndarray | None


def validate_tensors(
    written: GGUFFile,
    source: Source | None = None,
    planned: Sequence[PlannedTensor] = (),
    reported: Sequence[TensorReport] = (),
    *,
    importance: ImportanceLookup | None = None,
    threads: int = 1,
) -> Iterator[Checked]:
    """Yield every tensor of `written`, in order, as soon as it is checked.

    source: what the tensors were made of, to compare them with. planned: a plan for each tensor of
    the file; by default tensors of the source are found by name, and ShapeError says which is
    missing or has another shape. reported: what the run reported of them.
    """
    if source is not None and not planned:
        planned = _by_name(written, source)
    with ThreadPoolExecutor(threads, thread_name_prefix="validate") as pool:
        for number, tensor in enumerate(written.tensors):
            compared = None
            if source is not None:
                plan = planned[number]
                weights = None
                if importance is not None and not plan.kept:
                    weights = importance(plan.source.name, plan.source.shape)
                compared = _Comparison(plan, source, weights)
            sums, fault = ErrorTotals(), ""
            works = ((None, work) for work in _works(written, tensor, compared))
            with closing(results_in_order(pool, 2 * threads, works)) as results:
                for _, (found, measured) in results:
                    fault = fault or found
                    sums.add(measured)
            report = None
            if compared is not None:
                compared.source.release(compared.plan.source)
                report = sums.report(compared.plan, compared.weights is not None)
                if not fault and reported:
                    fault = _difference(reported[number], report)
            yield Checked(tensor, report, fault)


def _by_name(written: GGUFFile, source: Source) -> list[PlannedTensor]:
    known = {tensor.name: tensor for tensor in source.tensors}
    for tensor in written.tensors:
        if (other := known.get(tensor.name)) is None:
            raise ShapeError(
                "the source does not have this tensor", file=source.path, tensor=tensor.name
            )
        if other.shape != tensor.shape:
            raise ShapeError(
                f"has shape {list(other.shape)}, not {list(tensor.shape)}",
                file=source.path,
                tensor=tensor.name,
            )
    return [PlannedTensor(known[tensor.name], tensor) for tensor in written.tensors]


def _works(
    written: GGUFFile, tensor: TensorInfo, compared: _Comparison | None
) -> Iterator[Callable[[], tuple[str, np.ndarray | None]]]:
    """Yield functions that check a piece each. They return (fault, float64[6] for
    `ErrorTotals.add`, None if nothing is measured).
    """
    group = tensor.type.group_rows
    if compared is not None:
        group = math.lcm(group, compared.plan.source.type.group_rows)
    matrix_rows = tensor.n_rows // tensor.n_matrices
    step = max(1, PIECE_ELEMENTS // tensor.n_cols // group) * group
    for matrix in range(tensor.n_matrices):
        last = (matrix + 1) * matrix_rows
        for start in range(matrix * matrix_rows, last, step):
            stop = min(start + step, last)
            if compared is None:
                yield functools.partial(_check, written, tensor, start, stop)
            else:
                weights = None if compared.weights is None else compared.weights[matrix]
                yield functools.partial(_compare, written, tensor, compared, weights, start, stop)


def _check(
    written: GGUFFile, tensor: TensorInfo, start: int, stop: int
) -> tuple[str, np.ndarray | None]:
    rows = written.read_rows(tensor, start, stop)
    if tensor.type.name not in decodable_types():  # no rows of numbers
        return "", None
    values = decode(tensor.type, rows, tensor.n_cols, as_weights=True)
    return _first_non_finite(values, start), None


def _compare(
    written: GGUFFile,
    tensor: TensorInfo,
    compared: _Comparison,
    weights: np.ndarray | None,
    start: int,
    stop: int,
) -> tuple[str, np.ndarray | None]:
    plan, source = compared.plan, compared.source
    rows = written.read_rows(tensor, start, stop)
    if plan.kept:
        same = np.array_equal(rows, source.read_rows(plan.source, start, stop))
        if same and (tail := tensor.type.tail_bytes) and stop == tensor.n_rows:
            ours = written.read_bytes(tensor, tensor.n_bytes - tail, tensor.n_bytes)
            theirs = source.read_bytes(plan.source, tensor.n_bytes - tail, tensor.n_bytes)
            same = np.array_equal(ours, theirs)
        fault = f"the bytes of rows {start} to {stop - 1} are not those of the source"
        return "" if same else fault, None
    if tensor.type.name not in decodable_types():  # no rows of numbers
        return "", None
    values = decode(tensor.type, rows, tensor.n_cols, as_weights=True)
    x = decode(plan.source.type, source.read_rows(plan.source, start, stop), tensor.n_cols)
    zeroed = zero_non_finite(x) if plan.nan_to_zero else 0
    # Values that are not finite in the source stay so in a tensor that becomes floats.
    finite = np.isfinite(x)
    fault = _first_non_finite(values if finite.all() else np.where(finite, values, 0), start)
    return fault, np.array([*error_sums(x, values, weights), zeroed])


def _first_non_finite(values: np.ndarray, first_row: int) -> str:
    finite = np.isfinite(values)
    if finite.all():
        return ""
    row, column = (int(found[0]) for found in np.nonzero(~finite))
    return f"{values[row, column]} at row {first_row + row}, column {column}"


def _difference(reported: TensorReport, found: TensorReport) -> str:
    """Describe the first error that differs from the reported one by more than rounding."""
    if reported.rmse is None:
        return ""
    for what in ("rmse", "weighted_rmse", "largest_error"):
        before, now = getattr(reported, what), getattr(found, what)
        if now is None or not (
            math.isclose(before, now, rel_tol=TOLERANCE) or (math.isnan(before) and math.isnan(now))
        ):
            return f"{what.replace('_', ' ')} is {now}, the run reported {before:g}"
    return ""


def require_sound(
    path: str,
    parts: Sequence[str],
    source: Source,
    planned: Sequence[PlannedTensor],
    reported: Sequence[TensorReport],
    *,
    importance: ImportanceLookup | None = None,
    threads: int = 1,
    progress: RunProgress | None = None,
) -> None:
    """Raise ValidationError naming the first tensor of an output that does not read back as
    reported.

    parts: the current paths of the output's files (shards); path: their final name. progress is
    called for every tensor.
    """
    with ExitStack() as opened:
        files = []
        for part in parts:
            files.append(SingleFile(part))
            opened.callback(files[-1].close)
        faults = []
        for index, checked in enumerate(
            validate_tensors(
                GGUFFile(path, files, whole=False),
                source,
                planned,
                reported,
                importance=importance,
                threads=threads,
            )
        ):
            faults += [checked] if checked.fault else []
            if progress is not None:
                progress.validated(index, checked)
    if faults:
        more = f" ({len(faults)} tensors are not sound)" if len(faults) > 1 else ""
        raise ValidationError(
            f"read back differently: {faults[0].fault}{more}",
            file=path,
            tensor=faults[0].tensor.name,
        )
