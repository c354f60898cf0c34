"""Measure how sensitive a model is to errors in its tensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EvaluationError, UsageError
from ..formats.output import check_output, refuse_same_file
from ..version import __version__
from .models import opened_model, split_options, text_of
from .source import PathLike, loaded_imatrix

if TYPE_CHECKING:
    from ..formats.sensitivities import Probe
    from ..formats.source import TensorInfo
    from ..imatrix.data import Imatrix
    from ..imatrix.options import SensitivityOptions
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions


def measure_sensitivity(
    model: PathLike | Model,
    text: PathLike,
    out: PathLike | None = None,
    imatrix: PathLike | Imatrix | None = None,
    *,
    options: SensitivityOptions | None = None,
    load: LoadOptions | None = None,
    threads: int = 0,
    progress: Callable[[int, int, Probe], None] | None = None,
    **keywords: Any,
) -> list[Probe]:
    """Measure what an error in each tensor does to a model: each in turn is stored in another type,
    in memory, and the mean KL divergence from the unchanged model is measured.

    model: a path, opened with `load`, or an open model. The precision of a path is float32
    unless it is given; in float16 and bfloat16 a GPU computes in float32 only in the layers of a
    replaced tensor. Tensors are encoded on the CPU. text: a file, or the text itself.
    keywords: fields of `imatrix.options.SensitivityOptions` and, for a path, of
    `runtime.options.LoadOptions`; they win over `options` and `load`.

    - types: to store tensors in, the first that fits; default `probe.PROBE_TYPES`.
    - force: use an importance matrix that seems to belong to another model.
    - layers (1): replace the same tensor of this many layers together: faster, but less precise.
    - n_ctx (512), chunks (16), batch_tokens (2048): chunks of the text, see `measure_perplexity`.

    The result is written to `out` as JSON, for the `damage` of `recipe_for_target`. threads: for
    encoding. progress: called with (probes done, number of probes, the last one).
    """
    from ..formats.sensitivities import save_probes
    from ..imatrix.belongs import check_belongs
    from ..imatrix.half_range import widen
    from ..imatrix.options import SensitivityOptions
    from ..quantize.report.probe import PROBE_TYPES, probe_groups
    from ..runtime.evaluate.perplexity import measure_perplexity

    o, load = split_options(measure_sensitivity, model, keywords, SensitivityOptions, options, load)
    load = replace(load, precision=load.precision or "f32", threads=load.threads or threads)
    loaded, types, probes = loaded_imatrix(imatrix), tuple(o.types) or PROBE_TYPES, []
    content, path = text_of(text)
    with (
        opened_model(model, load) as opened,
        tempfile.TemporaryDirectory(prefix="iqforge-sensitivity-") as folder,
    ):
        if opened.precision == "int8":
            raise UsageError("the precision is int8, which has errors of its own: use f32")
        if out is not None:
            read = [path, None if loaded is None else loaded.path]
            refuse_same_file(out, [*opened.source.files, *(one for one in read if one)])
            check_output(out)  # fails before the work, not after it
        if loaded is not None:
            loaded = check_belongs(loaded, opened.source.tensors, force=o.force)
        base = os.path.join(folder, "base.kld")
        measure = partial(
            measure_perplexity,
            opened,
            content,
            n_ctx=o.n_ctx,
            chunks=o.chunks,
            batch_tokens=o.batch_tokens,
            save_logits=base,
        )
        try:
            measure()
        except EvaluationError:
            if opened.precision != "f16":
                raise
            widen(opened)
            measure()
        groups = probe_groups(opened.source.tensors, opened.architecture, o.layers)
        for group in groups:
            probes.append(_probe(opened, group, types, loaded, base, folder, threads))
            if progress is not None:
                progress(len(probes), len(groups), probes[-1])
    if out is not None:
        save_probes(
            out,
            probes,
            types=list(types),
            text=os.path.basename(path),
            n_ctx=o.n_ctx,
            chunks=o.chunks,
            imatrix=None if loaded is None else os.path.basename(loaded.path or ""),
            version=__version__,
        )
    return probes


def _probe(
    model: Model,
    group: Sequence[TensorInfo],
    types: Sequence[str],
    imatrix: Imatrix | None,
    base: str,
    folder: str,
    threads: int,
) -> Probe:
    """Measure one group of tensors. Blocks are stored in a file, so that a large tensor takes no
    memory that others need.
    """
    from ..formats.sensitivities import Probe
    from ..quantize.report.probe import encode_tensor, probe_type
    from ..runtime.evaluate.divergence import measure_divergence

    error = 0.0
    try:
        for number, tensor in enumerate(group):
            type, weights = (
                probe_type(tensor, types),
                (None if imatrix is None else imatrix.importance(tensor.name, tensor.shape)),
            )
            shape = (tensor.n_rows, type.row_bytes(tensor.n_cols))
            blocks = np.memmap(
                os.path.join(folder, f"{number}.blocks"), np.uint8, "w+", shape=shape
            )
            error += (
                encode_tensor(model.source, tensor, type, weights, blocks, threads).weighted_rmse
                ** 2
            )
            model.weights.store.replace(tensor.name, type, blocks)
        kld = measure_divergence(model, base).mean_kld
    finally:
        for tensor in group:
            model.weights.store.restore(tensor.name)
    return Probe(tuple(tensor.name for tensor in group), error, max(0.0, kld))
