"""Repack the tensors of a whole model into the row-interleaved form of their type, or back. No
value changes.

Tensors are repacked if their type has an interleaved form, if the rows of each matrix are a
multiple of its row group, and if they are not looked up by row. Rows stream through in pieces of
bounded size, on several threads, and are written in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from ...formats.codecs.codec import deinterleave, interleave
from ...formats.ftypes import FILE_TYPES
from ...formats.gguf.reader import GGUFFile
from ...formats.source import Sink, TensorInfo
from ...formats.types import TYPES, GGMLType, ggml_type
from ..plan.fallbacks import BY_ROW
from ..plan.overrides import regular_expressions
from ..plan.plan import PlannedTensor
from ..plan.roles import NEVER_INTERLEAVED
from .parallel import results_in_order, thread_count
from .report import RunProgress, RunReport, TensorReport

PIECE_BYTES = 8 << 20
_OLD_FORMS = ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8")  # can be undone, but are no longer written

# The preset of a repacked file, and the presets of plain files that become it, as in
# `llama-quantize --repack` of ik_llama.cpp. Undoing gives the first of them. All other numbers
# stay, also that of MXFP4, whose tensors are repacked.
_PRESETS = {
    "Q4_0_R8": ["Q4_0"],
    "Q8_0_R8": ["Q8_0"],
    "Q5_0_R4": ["Q5_0"],
    "Q6_0_R4": ["Q6_0"],
    "Q2_K_R4": ["Q2_K"],
    "Q3_K_R4": ["Q3_K_M", "Q3_K_S", "Q3_K_L"],
    "Q4_K_R4": ["Q4_K_M", "Q4_K_S"],
    "Q5_K_R4": ["Q5_K_M", "Q5_K_S"],
    "Q6_K_R4": ["Q6_K"],
    "IQ2_XXS_R4": ["IQ2_XXS"],
    "IQ2_XS_R4": ["IQ2_XS"],
    "IQ2_M_R4": ["IQ2_M"],
    "IQ3_XXS_R4": ["IQ3_XXS"],
    "IQ3_S_R4": ["IQ3_S"],
    "IQ1_S_R4": ["IQ1_S"],
    "IQ1_M_R4": ["IQ1_M"],
    "IQ4_NL_R4": ["IQ4_NL"],
    "IQ4_XS_R8": ["IQ4_XS"],
    "BF16_R16": ["BF16"],
    "IQ2_BN_R4": ["IQ2_BN"],
    "IQ2_K_R4": ["IQ2_K"],
    "IQ3_K_R4": ["IQ3_K"],
    "IQ4_K_R4": ["IQ4_K"],
    "IQ5_K_R4": ["IQ5_K"],
    "IQ4_KS_R4": ["IQ4_KS"],
    "IQ5_KS_R4": ["IQ5_KS"],
    "Q8_KV_R8": ["Q8_KV"],
}
_ONLY_UNDONE = {"MXFP4_R8": "MXFP4"} | dict.fromkeys(_OLD_FORMS, "Q4_0")


def interleaved_form(type: GGMLType) -> GGMLType | None:
    """Return the interleaved type that rows of `type` repack into, None if there is none."""
    return next(
        (form for form in TYPES.values() if form.base == type.name and form.name not in _OLD_FORMS),
        None,
    )


def plan_repack(
    tensors: Sequence[TensorInfo], patterns: Iterable[str] = (), undo: bool = False
) -> list[PlannedTensor]:
    """Plan every tensor. `note` says why a tensor stays that one might expect to change.

    patterns: only tensors whose name contains a match of one of these regular expressions; without
    patterns all tensors. Raise UsageError for a pattern that is not a regular expression.
    """
    matchers, planned = regular_expressions(patterns), []
    for tensor in tensors:
        target, note = _undone(tensor.type) if undo else _repacked(tensor)
        if (
            target is not tensor.type
            and matchers
            and not any(matcher.search(tensor.name) for matcher in matchers)
        ):
            target, note = tensor.type, "not selected"
        planned.append(PlannedTensor(tensor, tensor.with_type(target), note))
    return planned


def _repacked(tensor: TensorInfo) -> tuple[GGMLType, str]:
    kind, form = tensor.type, interleaved_form(tensor.type)
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    if form is None:
        return kind, (
            f"{kind} has no interleaved form"
            if kind.is_quantized and not kind.is_interleaved
            else ""
        )
    if tensor.name in NEVER_INTERLEAVED:
        return kind, BY_ROW
    if rows % form.group_rows:
        return kind, f"{rows} rows are not a multiple of {form.group_rows}"
    if tensor.n_cols % form.row_multiple:
        return kind, f"row length {tensor.n_cols} is not a multiple of {form.row_multiple}"
    return form, ""


def _undone(kind: GGMLType) -> tuple[GGMLType, str]:
    if kind.base:
        return ggml_type(kind.base), ""
    return kind, f"{kind} has no plain form" if kind.is_interleaved else ""


def repacked_file_type(
    number: object, planned: Sequence[PlannedTensor], undo: bool = False
) -> int | None:
    """Return the new number for `general.file_type`, None if it stays. It stays when undoing leaves
    tensors of the preset's interleaved type.
    """
    if not undo:
        return next(
            (
                FILE_TYPES[form].number
                for form, plain in _PRESETS.items()
                if number in [FILE_TYPES[p].number for p in plain]
            ),
            None,
        )
    plain = {form: names[0] for form, names in _PRESETS.items()} | _ONLY_UNDONE
    form = next((form for form in plain if FILE_TYPES[form].number == number), None)
    if form is None or any(plan.target.type is FILE_TYPES[form].base for plan in planned):
        return None
    return FILE_TYPES[plain[form]].number


def stream_repacked(
    source: GGUFFile,
    planned: Sequence[PlannedTensor],
    sink: Sink,
    *,
    threads: int = 0,
    progress: RunProgress | None = None,
) -> RunReport:
    """Carry out a plan of `plan_repack`. The sink must list the plan's target tensors in order. The
    caller finishes it.

    threads: see `thread_count`. Their number changes no byte.
    """
    progress = progress or RunProgress()
    threads = thread_count(threads)
    report = RunReport()
    progress.begin(planned)
    with ThreadPoolExecutor(threads, thread_name_prefix="repack") as pool:
        for index, plan in enumerate(planned):
            n_done = 0
            with closing(results_in_order(pool, 2 * threads, _pieces(source, plan))) as results:
                for _, data in results:
                    sink.write(plan.target, data)
                    n_done += data.nbytes
                    progress.advance(_share(plan, n_done) - _share(plan, n_done - data.nbytes))
            report.tensors.append(TensorReport(plan))
            progress.tensor_done(index, report.tensors[-1])
    progress.end(report)
    return report


def _share(plan: PlannedTensor, n_bytes: int) -> int:
    """Return the number of elements in the first bytes of the result, rounded down."""
    return plan.source.n_elements * n_bytes // plan.target.n_bytes


def _pieces(
    source: GGUFFile, plan: PlannedTensor
) -> Iterator[tuple[None, Callable[[], np.ndarray]]]:
    """Yield functions that make the next bytes of the result, one after another, for
    `results_in_order`.
    """
    info, target = plan.source, plan.target.type
    if plan.kept:
        for start in range(0, info.n_bytes, PIECE_BYTES):
            yield (
                None,
                lambda start=start: np.array(
                    source.read_bytes(info, start, min(start + PIECE_BYTES, info.n_bytes))
                ),
            )
        return
    convert, kind = (interleave, target) if target.is_interleaved else (deinterleave, info.type)
    step = max(1, PIECE_BYTES // (info.row_bytes * kind.group_rows)) * kind.group_rows
    for start in range(0, info.n_rows, step):
        yield (
            None,
            lambda start=start: convert(
                kind, source.read_rows(info, start, min(start + step, info.n_rows)), info.n_cols
            ),
        )
