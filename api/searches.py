"""Measure what quantizing to types would lose, time their searches, and compile them ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..formats.codecs.codec import decodable_types
from ..formats.options import from_keywords
from ..quantize.run.compile_task import CompileProgress
from ..quantize.searches import encodable_types
from .devices import devices_to_measure
from .source import (
    PathLike,
    loaded_imatrix,
    open_source,
)

if TYPE_CHECKING:
    from ..imatrix.data import Imatrix
    from ..quantize.options import StatsOptions, WarmUpOptions
    from ..quantize.report.stats import StatsProgress, StatsReport
    from ..quantize.report.type_bench import TypeBenchOptions
    from ..quantize.run.compile_task import CompileTask


def quantize_stats(
    model: PathLike,
    types: Sequence[str] = (),
    imatrix: PathLike | Imatrix | None = None,
    *,
    options: StatsOptions | None = None,
    progress: StatsProgress | None = None,
    **keywords: Any,
) -> StatsReport:
    """Measure what quantizing the tensors of a GGUF model or a checkpoint folder to each of `types`
    would lose; nothing is written.

    types: names; by default all plain quantized types there is a search for. keywords: fields of
    `quantize.options.StatsOptions`, which win over `options`:

    - include: regular expressions, of which one must be found in the name of a tensor.
    - rows: measure about so many rows of each tensor, evenly spaced, instead of all.
    - device: "cpu", "cuda" (all GPUs), "cuda:1", "cuda:0,2" or "auto", see
      `quantize.report.device_stats`. threads: 0 for one per core.
    - force: use an importance matrix that seems to belong to another model.

    Return sums of squared errors by tensor and type, see `quantize.report.stats`. Raise UsageError
    if no tensor is left.
    """
    from ..formats.types import ggml_type
    from ..imatrix.belongs import check_belongs
    from ..quantize.cuda.devices import find_devices
    from ..quantize.options import StatsOptions
    from ..quantize.report.stats import StatsReport, choose_tensors, choose_types, collect_stats

    [o] = from_keywords(quantize_stats, keywords, (StatsOptions, options))
    chosen = choose_types([ggml_type(name) for name in types], encodable_types())
    devices = () if o.device == "auto" else find_devices(o.device)  # an error before any work
    loaded = loaded_imatrix(imatrix)
    with open_source(model) as source:
        if loaded is not None:
            loaded = check_belongs(loaded, source.tensors, force=o.force)
        report = StatsReport(
            os.fspath(model),
            chosen,
            max(0, o.rows),
            None if loaded is None else loaded.path,
            source.files,
        )
        tensors = choose_tensors(source, o.include, decodable_types())
        if o.device == "auto":
            devices = devices_to_measure([(tensors, chosen)], report.sampled)
        return collect_stats(
            source,
            tensors,
            chosen,
            report,
            importance=None if loaded is None else loaded.importance,
            threads=o.threads,
            devices=devices,
            progress=progress,
        )


def warm_up(
    types: Sequence[str] = (),
    *,
    options: WarmUpOptions | None = None,
    progress: CompileProgress | None = None,
    **keywords: Any,
) -> list[CompileTask]:
    """Compile the searches and decoders of `types`, by default all that can be quantized to, so
    that later runs start at once. The code stays in a cache on disk.

    keywords: fields of `quantize.options.WarmUpOptions`, which win over `options`. processes: the
    most that compile at a time, 0 for one per core. Return what had to be compiled. Raise
    UnsupportedTypeError for a type without a search.
    """
    from ..formats.types import ggml_type
    from ..quantize.options import WarmUpOptions
    from ..quantize.run.compilation import compile_ahead, tasks_of_types

    [o] = from_keywords(warm_up, keywords, (WarmUpOptions, options))
    names = [ggml_type(name).name for name in types] or encodable_types()
    return compile_ahead(tasks_of_types(names, (True, False)), progress, o.processes)


def benchmark_types(
    types: Sequence[str] = (),
    *,
    options: TypeBenchOptions | None = None,
    progress: CompileProgress | None = None,
    **keywords: Any,
) -> Iterator[dict[str, Any]]:
    """Measure the speed and error of quantizing to each type; yields a row of figures per type.
    Code is compiled before anything is timed.

    types: names; by default all that have a search, ("all",) for those too that interleave the rows
    of another. keywords: fields of `quantize.report.type_bench.TypeBenchOptions`.
    """
    from ..quantize.report.type_bench import TypeBenchOptions, measured_rows

    [chosen] = from_keywords(benchmark_types, keywords, (TypeBenchOptions, options))
    return measured_rows(types, chosen, progress)
