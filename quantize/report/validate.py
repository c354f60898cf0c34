"""Reading a quantized file back: whether every value is a number, and every error the one that the
run reported.

Tensors are decoded in pieces of rows on several threads, beside the source where there is one.
Bytes that were kept must be equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np

from ...errors import ShapeError, ValidationError
from ...formats.codec import decodable_types, decode
from ...formats.gguf.reader import GGUFFile, SingleFile
from ...formats.source import Source, TensorInfo
from ..encode import zero_non_finite
from ..plan.plan import PlannedTensor
from ..run.cpu_worker import error_sums
from ..run.parallel import results_in_order
from ..run.piece import PIECE_ELEMENTS, ImportanceLookup
from ..run.report import Checked, ErrorTotals, RunProgress, TensorReport

TOLERANCE = 1e-5  # relative; sums are in another order on GPUs


def validate_tensors(
    written: GGUFFile,
    source: Source | None = None,
    planned: Sequence[PlannedTensor] = (),
    reported: Sequence[TensorReport] = (),
    *,
    importance: ImportanceLookup | None = None,
    threads: int = 1,
) -> Iterator[Checked]:
    """Every tensor of `written`, in order, as soon as it is checked.

    source: what the tensors were made of; they are compared then. planned: one for each tensor of
    the file; by default tensors of the source are found by their names, and ShapeError says which
    is not there or has another shape. reported: what the run says of them.
    """
    if source is not None and not planned:
        planned = _by_name(written, source)
    plans = planned if source is not None else [None] * len(written.tensors)
    with ThreadPoolExecutor(threads, thread_name_prefix="validate") as pool:
        for number, (tensor, plan) in enumerate(zip(written.tensors, plans)):
            weights = (
                None
                if importance is None or plan is None or plan.kept
                else importance(plan.source.name, plan.source.shape)
            )
            sums, fault = ErrorTotals(), ""
            works = ((None, work) for work in _works(written, tensor, source, plan, weights))
            with closing(results_in_order(pool, 2 * threads, works)) as results:
                for _, (found, measured) in results:
                    fault = fault or found
                    sums.add(measured)
            written.release(tensor)
            if source is not None:
                source.release(plan.source)
            report = None if plan is None else sums.report(plan, weights is not None)
            if not fault and report is not None and reported:
                fault = _difference(reported[number], report)
            yield Checked(tensor, report, fault)


def _by_name(written: GGUFFile, source: Source) -> list[PlannedTensor]:
    known = {tensor.name: tensor for tensor in source.tensors}
    for tensor in written.tensors:
        if (other := known.get(tensor.name)) is None:
            raise ShapeError(
                "there is no such tensor to compare with", file=source.path, tensor=tensor.name
            )
        if other.shape != tensor.shape:
            raise ShapeError(
                f"has shape {list(other.shape)}, not {list(tensor.shape)}",
                file=source.path,
                tensor=tensor.name,
            )
    return [PlannedTensor(known[tensor.name], tensor) for tensor in written.tensors]


def _works(
    written: GGUFFile,
    tensor: TensorInfo,
    source: Source | None,
    plan: PlannedTensor | None,
    weights: np.ndarray | None,
) -> Iterator[Callable[[], tuple[str, np.ndarray | None]]]:
    """Functions that check a piece each: (fault, float64[6] as `ErrorTotals.add` takes it, None
    where nothing is measured).
    """
    group = (
        tensor.type.group_rows
        if plan is None
        else math.lcm(tensor.type.group_rows, plan.source.type.group_rows)
    )
    matrix_rows = tensor.n_rows // tensor.n_matrices
    step = max(1, PIECE_ELEMENTS // tensor.n_cols // group) * group
    for matrix in range(tensor.n_matrices):
        own, last = None if weights is None else weights[matrix], (matrix + 1) * matrix_rows
        for start in range(matrix * matrix_rows, last, step):
            yield functools.partial(
                _check, written, tensor, source, plan, own, start, min(start + step, last)
            )


def _check(
    written: GGUFFile,
    tensor: TensorInfo,
    source: Source | None,
    plan: PlannedTensor | None,
    weights: np.ndarray | None,
    start: int,
    stop: int,
) -> tuple[str, np.ndarray | None]:
    rows = written.read_rows(tensor, start, stop)
    where = f"rows {start} to {stop - 1}"
    if plan is not None and plan.kept:
        same = np.array_equal(rows, source.read_rows(plan.source, start, stop))
        if same and (tail := tensor.type.tail_bytes) and stop == tensor.n_rows:
            ends = [
                file.read_bytes(info, info.n_bytes - tail, info.n_bytes)
                for file, info in ((written, tensor), (source, plan.source))
            ]
            same = np.array_equal(*ends)
        return "" if same else f"the bytes of {where} are not those of the source", None
    if tensor.type.name not in decodable_types():  # no rows of numbers
        return "", None
    values = decode(tensor.type, rows, tensor.n_cols, as_weights=True)
    if plan is None:
        return _first_non_finite(values, start), None
    x = decode(plan.source.type, source.read_rows(plan.source, start, stop), tensor.n_cols)
    zeroed = zero_non_finite(x) if plan.nan_to_zero else 0
    # What is not finite in the source stays so in a tensor that becomes floats.
    fault = _first_non_finite(
        values if np.isfinite(x).all() else np.where(np.isfinite(x), values, 0), start
    )
    return fault, np.array([*error_sums(x, values, weights), zeroed])


def _first_non_finite(values: np.ndarray, first_row: int) -> str:
    finite = np.isfinite(values)
    if finite.all():
        return ""
    row, column = (int(found[0]) for found in np.nonzero(~finite))
    return f"{values[row, column]} at row {first_row + row}, column {column}"


def _difference(reported: TensorReport, found: TensorReport) -> str:
    """What of the errors is not as reported, to rounding."""
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
    """ValidationError naming the first tensor of an output that does not read back as it was
    reported.

    parts: the output's files (shards) as they lie on the disk now, `path` is what they will be
    called. progress hears of every tensor.
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
