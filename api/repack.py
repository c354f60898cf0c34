"""Repack the tensors of a model into row-interleaved types, or back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..formats.options import from_keywords
from ..quantize.run.report import RunProgress, RunReport, report_plan
from .source import PathLike

if TYPE_CHECKING:
    from ..quantize.options import RepackOptions


def repack_model(
    src: PathLike,
    out: PathLike | None,
    *,
    options: RepackOptions | None = None,
    progress: RunProgress | None = None,
    **keywords: Any,
) -> RunReport:
    """Write a GGUF file (also the first shard of a split one) with its tensors in row-interleaved
    form, or with `undo` in plain form.

    Nothing is quantized, and undoing gives back every byte of the tensors. Where nothing can be
    changed no file is written: all tensors of the report are `.planned.kept` then.

    keywords: fields of `quantize.options.RepackOptions`, which win over `options`. pattern: regular
    expressions, of which one must be found in the name of a tensor; by default all tensors.
    dry_run: plan only, `out` may be None. threads: 0 for one per core.
    """
    from ..formats.gguf.reader import open_gguf
    from ..formats.gguf.writer import GGUFWriter
    from ..formats.output import refuse_same_file
    from ..quantize.options import RepackOptions
    from ..quantize.plan.metadata import quantized_metadata
    from ..quantize.run.repack import plan_repack, repacked_file_type, stream_repacked

    [o] = from_keywords(repack_model, keywords, (RepackOptions, options))
    with open_gguf(src) as source:
        pattern = [o.pattern] if isinstance(o.pattern, str) else o.pattern
        planned = plan_repack(source.tensors, pattern, o.undo)
        if o.dry_run or all(plan.kept for plan in planned):
            return report_plan(planned, progress)
        if out is None:
            raise UsageError("an output file is needed")
        refuse_same_file(out, source.files)
        stated = source.metadata.get("general.file_type")
        number = repacked_file_type(stated.data, planned, o.undo) if stated is not None else None
        with GGUFWriter(
            out, quantized_metadata(source.metadata, number), [plan.target for plan in planned]
        ) as sink:
            return stream_repacked(source, planned, sink, threads=o.threads, progress=progress)
