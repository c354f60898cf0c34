"""Convert checkpoints and adapters, also straight to quantized files."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..formats.options import from_keywords
from ..quantize.run.report import RunProgress
from .devices import devices_of_plan
from .plan import plan_quantization
from .source import (
    PathLike,
    check_fields,
    imatrix_note,
    importance_lookup,
    loaded_imatrix,
    open_source,
)

if TYPE_CHECKING:
    from ..convert.architectures.layout_options import LayoutOptions
    from ..convert.options import ConvertOptions, LoraOptions
    from ..formats.source import Source, TensorInfo
    from ..formats.tools.sharding import OutputPlan
    from ..imatrix.data import Imatrix
    from ..quantize.plan.plan import PlannedTensor

log = logging.getLogger(__name__)


def convert_model(
    src: PathLike,
    out: PathLike | None = None,
    outtype: str = "auto",
    *,
    imatrix: PathLike | Imatrix | None = None,
    options: ConvertOptions | None = None,
    layout: LayoutOptions | None = None,
    progress: RunProgress | None = None,
    **keywords: Any,
) -> Path:
    """Convert a Hugging Face checkpoint to a GGUF file, or to shards. Return the path of the
    (first) file.

    src: folder, or `hf://organization/model[@revision]`. out: file, folder, or None for a name made
    from the model's inside `src`, in the working folder if that is remote; may contain `{ftype}`.
    outtype: f32, f16, bf16, q8_0, auto (what the checkpoint stores), or a preset of
    `quantize_model`, with its mix and `imatrix`. With a preset, the checkpoint is quantized as it
    is read, with no file in between.

    keywords: fields of `convert.options.ConvertOptions` and `LayoutOptions`; they win over
    `options` and `layout`.

    - pre: name of the pre-tokenizer, if it cannot be derived. name: `general.name`. metadata: JSON
      file with `general.*` keys to set, see `convert.metadata.overrides`.
    - split_max_size (bytes, `300M`, `2G`), split_max_tensors, no_tensor_first_split: shards, see
      `formats.tools.sharding.ShardLimits`.
    - device: where a preset is quantized, see `quantize_models`. Converting to floats is the CPU's.
    - force: use an importance matrix that seems to belong to another model.
    - merge_gate_up, mtp, mla_layout, vocab_only: see `LayoutOptions`.

    Raise CheckpointError and the errors related to it; OutputError also for a disk that is too
    small, before anything is written.
    """
    from ..convert.architectures.layout_options import LayoutOptions
    from ..convert.options import ConvertOptions
    from ..quantize.run.stream import RunOutput, stream

    check_fields(convert_model, keywords, ConvertOptions, LayoutOptions)
    o, chosen = from_keywords(
        "convert_model", keywords, (ConvertOptions, options), (LayoutOptions, layout)
    )
    loaded = loaded_imatrix(imatrix)
    with open_source(src, pre=o.pre, name=o.name, **asdict(chosen)) as source:
        planned, output, used = _plan(source, out, outtype, o, loaded)
        devices = devices_of_plan(o.device, planned)
        log.info("%s", output)
        with output.open() as sink:
            stream(
                source,
                [
                    RunOutput(
                        planned, sink, importance_lookup(used, planned), progress or RunProgress()
                    )
                ],
                threads=o.threads,
                devices=devices,
                measure=False,
            )
    return output.paths[0]


def convert_lora(
    src: PathLike,
    out: PathLike | None = None,
    outtype: str = "f32",
    *,
    options: LoraOptions | None = None,
    progress: RunProgress | None = None,
    **keywords: Any,
) -> Path:
    """Convert the PEFT LoRA adapter in folder `src` to a GGUF file. Return its path.

    out: file, folder, or None for a name made from the adapter's inside `src`. outtype: f32, f16,
    bf16, q8_0 or auto. keywords: fields of `convert.options.LoraOptions`, which win over `options`:
    base: folder with the base model's config.json; name: `general.name`; threads. Raise the errors
    of `convert.lora.AdapterSource`, and OutputError.
    """
    from ..convert.lora import AdapterSource, adapter_path, plan_adapter
    from ..convert.options import LoraOptions
    from ..formats.tools.sharding import plan_output
    from ..quantize.plan.plan import PlannedTensor
    from ..quantize.run.stream import RunOutput, stream

    [o] = from_keywords(convert_lora, keywords, (LoraOptions, options))
    with AdapterSource(src, o.base, o.name) as source:
        targets, kind = plan_adapter(source, outtype)
        output = plan_output(
            adapter_path(source, out, kind), source.metadata, targets, inputs=source.files
        )
        with output.open() as sink:
            planned = [PlannedTensor(*pair) for pair in zip(source.tensors, targets)]
            stream(
                source,
                [RunOutput(planned, sink, progress=progress or RunProgress())],
                threads=o.threads,
            )
    return output.paths[0]


def plan_lora(
    src: PathLike,
    out: PathLike | None = None,
    outtype: str = "f32",
    *,
    options: LoraOptions | None = None,
    **keywords: Any,
) -> tuple[list[TensorInfo], Path]:
    """Return the tensors and the path of the file that `convert_lora` would write."""
    from ..convert.lora import AdapterSource, adapter_path, plan_adapter
    from ..convert.options import LoraOptions

    [o] = from_keywords(plan_lora, keywords, (LoraOptions, options))
    with AdapterSource(src, o.base, o.name) as source:
        targets, kind = plan_adapter(source, outtype)
        return targets, adapter_path(source, out, kind)


def plan_conversion(
    source: Source,
    out: PathLike | None,
    outtype: str,
    *,
    imatrix: PathLike | Imatrix | None = None,
    keep_name: bool = False,
    options: ConvertOptions | None = None,
    **keywords: Any,
) -> tuple[list[PlannedTensor], OutputPlan]:
    """Return what `convert_model` would do with an open checkpoint: every tensor's types, and the
    files. Nothing is read or written.

    keep_name: ignore `general.name` of the JSON file `metadata`, as where `name` is given.
    keywords: fields of `convert.options.ConvertOptions`; they win over `options`.
    """
    from ..convert.options import ConvertOptions

    check_fields(plan_conversion, keywords, ConvertOptions)
    [o] = from_keywords("plan_conversion", keywords, (ConvertOptions, options))
    planned, output, _ = _plan(source, out, outtype, o, loaded_imatrix(imatrix), keep_name)
    return planned, output


def _plan(
    source: Source,
    out: PathLike | None,
    outtype: str,
    o: ConvertOptions,
    imatrix: Imatrix | None,
    keep_name: bool = False,
) -> tuple[list[PlannedTensor], OutputPlan, Imatrix | None]:
    """Return every tensor's types, the files, and the entries of the importance matrix that are
    used.
    """
    from ..convert.metadata.overrides import read_overrides, with_overrides
    from ..convert.naming import output_path
    from ..convert.source import CheckpointSource
    from ..convert.tensors.outtype import OUTTYPES, plan_outtype, resolve_outtype
    from ..formats.ftypes import file_type
    from ..formats.tools.sharding import ShardLimits, plan_output
    from ..formats.values import u32
    from ..imatrix.belongs import check_belongs
    from ..quantize.plan.metadata import quantized_metadata
    from ..quantize.plan.plan import PlannedTensor
    from .runnable import why_it_cannot_run

    limits = ShardLimits(o.split_max_tensors, o.split_max_size, o.no_tensor_first_split)
    if not isinstance(source, CheckpointSource):
        raise UsageError(
            "is a GGUF file already, conversion takes a checkpoint; iqforge quantize changes types",
            file=source.path,
        )
    if o.metadata is not None:
        overrides = read_overrides(o.metadata)
        if keep_name or o.name is not None:
            overrides.pop("general.name", None)
        source.metadata = with_overrides(source.metadata, overrides)
    if (reason := why_it_cannot_run(source)) is not None:
        log.warning("iqforge can convert this model, but its runtime cannot run it: %s", reason)
    path, keys = output_path(source, out, outtype), source.metadata
    if (kind := resolve_outtype(source.tensors, outtype)) in OUTTYPES:
        targets, number = plan_outtype(source, kind)
        planned = [PlannedTensor(tensor, target) for tensor, target in zip(source.tensors, targets)]
        keys = keys | {"general.file_type": u32(number)} if planned else keys
        if imatrix is not None:
            log.warning("--outtype %s does not use an importance matrix", kind)
    else:
        if imatrix is not None:
            imatrix = check_belongs(imatrix, source.tensors, force=o.force)
        planned = plan_quantization(source, kind, imatrix)
        keys = (
            quantized_metadata(keys, file_type(kind).number, imatrix_note(imatrix))
            if planned
            else keys
        )
    read = [o.metadata, None if imatrix is None else imatrix.path]
    inputs = [*source.files, *(one for one in read if one)]
    output = plan_output(path, keys, [plan.target for plan in planned], limits, inputs)
    return planned, output, imatrix
