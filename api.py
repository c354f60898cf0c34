"""The public Python API: everything the commands do, joined here because no single folder may know all the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .convert.gate_up import merge_gate_up
from .convert.split import merge_model, split_model
from .errors import NotFoundError, UsageError
from .formats.codec import decodable_types, decode, decode_tensor, deinterleave, interleave
from .formats.gguf.hashes import check_hashes, hash_model
from .formats.gguf.summary import inspect_model
from .quantize.encode import encodable_types, encode
from .quantize.run import Progress, RunReport

if TYPE_CHECKING:
    import torch

    from .convert.checkpoint import Checkpoint
    from .convert.output import OutputPlan
    from .formats.source import Source
    from .imatrix.data import Imatrix
    from .quantize.metadata import ImatrixNote
    from .quantize.plan import PlannedTensor
    from .quantize.run import ImportanceLookup
    from .quantize.stats import StatsProgress, StatsReport
    from .runtime.bench import Result
    from .runtime.evaluate.divergence import Divergence
    from .runtime.evaluate.perplexity import Perplexity
    from .runtime.model import Model

__all__ = ["convert_model", "quantize_model", "collect_imatrix", "measure_perplexity", "split_model", "merge_model", "load_model",
           "decode", "decode_tensor", "encode", "interleave", "deinterleave", "decodable_types", "encodable_types", "open_source",
           "inspect_model", "hash_model", "check_hashes", "merge_gate_up", "convert_lora",
           "plan_quantization", "plan_conversion", "repack_model", "quantize_stats", "decode_torch", "generate",
           "random_model", "benchmark_model"]

PathLike = str | os.PathLike
log = logging.getLogger(__name__)


def open_source(path: PathLike, **checkpoint_options: Any) -> Source:
    """A GGUF file (or the first shard of a split one), a folder with a Hugging Face checkpoint, or `hf://organization/model[@revision]`,
    a checkpoint on the Hub of which only the rows that are read are fetched, as a `Source`."""
    if os.fspath(path).startswith("hf://"):
        from .convert.remote import open_remote

        return _checkpoint_source(open_remote(os.fspath(path)), checkpoint_options)
    if not os.path.exists(path):
        raise NotFoundError("no such file or folder", file=path)
    if os.path.isdir(path):
        from .convert.checkpoint import open_checkpoint

        return _checkpoint_source(open_checkpoint(path), checkpoint_options)
    from .formats.gguf.reader import open_gguf

    return open_gguf(path)


def _checkpoint_source(checkpoint: Checkpoint, options: dict[str, Any]) -> Source:
    from .convert.source import CheckpointSource

    try:
        return CheckpointSource(checkpoint, **options)
    except BaseException:
        checkpoint.close()
        raise


def convert_model(src: PathLike, out: PathLike | None = None, outtype: str = "auto", *, pre: str | None = None,
                  name: str | None = None, metadata: PathLike | None = None, imatrix: PathLike | Imatrix | None = None,
                  split_max_size: str | int | None = None, split_max_tensors: int | None = None, no_tensor_first_split: bool = False,
                  threads: int = 0, progress: Progress | None = None, **layout: Any) -> Path:
    """Convert a Hugging Face checkpoint to a GGUF file, or to shards; returns the path of the (first) file.

    src: folder, or `hf://organization/model[@revision]`. out: file, folder, or None for a name made from the model's inside `src`, in the
    working folder if that is remote; may contain `{ftype}`.
    outtype: f32, f16, bf16, q8_0, auto (what the checkpoint stores), or a preset of `quantize_model`, with its mix and `imatrix`. The
    checkpoint is quantized as it is read then, with no file in between. pre: name of the pre-tokenizer, if it cannot be derived.
    name: `general.name`. metadata: JSON file with `general.*` keys to set, see `convert.overrides`. split_max_size (bytes, `300M`, `2G`),
    split_max_tensors, no_tensor_first_split: shards, see `convert.output.Limits`. layout: see `convert.options.Options` (merge_gate_up,
    mtp, mla_layout, vocab_only). Raises CheckpointError and its kin; OutputError also for a disk that is too small, before it starts.
    """
    from .quantize.run import stream

    loaded = _load_imatrix(imatrix)
    with open_source(src, pre=pre, name=name, **layout) as source:
        planned, output = plan_conversion(source, out, outtype, metadata=metadata, keep_name=name is not None, imatrix=loaded,
                                          split_max_size=split_max_size, split_max_tensors=split_max_tensors,
                                          no_tensor_first_split=no_tensor_first_split)
        log.info("%s", output)
        with output.open() as sink:
            stream(source, planned, sink, importance=_importance(loaded, planned), threads=threads, progress=progress, measure=False)
    return output.paths[0]


def convert_lora(src: PathLike, out: PathLike | None = None, outtype: str = "f32", *, base: PathLike | None = None, name: str | None = None,
                 threads: int = 0, progress: Progress | None = None) -> Path:
    """Convert the PEFT LoRA adapter in folder `src` to a GGUF file; returns its path.

    out: file, folder, or None for a name made from the adapter's inside `src`. outtype: f32, f16, bf16, q8_0 or auto. base: folder with
    the base model's config.json. name: `general.name`. Raises as `convert.lora.AdapterSource`; OutputError.
    """
    from .convert.lora import AdapterSource, adapter_path, plan_adapter
    from .convert.output import plan_output
    from .quantize.plan import PlannedTensor
    from .quantize.run import stream

    with AdapterSource(src, base, name) as source:
        targets, kind = plan_adapter(source, outtype)
        output = plan_output(adapter_path(source, out, kind), source.metadata, targets, inputs=source.files)
        with output.open() as sink:
            stream(source, [PlannedTensor(*pair) for pair in zip(source.tensors, targets)], sink, threads=threads, progress=progress)
    return output.paths[0]


def plan_conversion(source: Source, out: PathLike | None, outtype: str, *, metadata: PathLike | None = None, keep_name: bool = False,
                    imatrix: PathLike | Imatrix | None = None, split_max_size: str | int | None = None,
                    split_max_tensors: int | None = None, no_tensor_first_split: bool = False) -> tuple[list[PlannedTensor], OutputPlan]:
    """What `convert_model` would do with an open checkpoint: every tensor's types, and the files. Nothing is read or written.

    keep_name: `general.name` of the JSON file `metadata` does not count.
    """
    from .convert.naming import output_path
    from .convert.output import Limits, plan_output
    from .convert.outtype import OUTTYPES, plan_outtype, resolve_outtype
    from .convert.overrides import read_overrides, with_overrides
    from .formats.ftypes import file_type
    from .formats.gguf.values import u32
    from .quantize.metadata import quantized_metadata
    from .quantize.plan import PlannedTensor

    limits, imatrix = Limits(split_max_tensors, split_max_size, no_tensor_first_split), _load_imatrix(imatrix)
    if metadata is not None:
        overrides = read_overrides(metadata)
        if keep_name:
            overrides.pop("general.name", None)
        source.metadata = with_overrides(source.metadata, overrides)
    path, keys = output_path(source, out, outtype), source.metadata
    if (kind := resolve_outtype(source.tensors, outtype)) in OUTTYPES:
        targets, number = plan_outtype(source, kind)
        planned = [PlannedTensor(tensor, target) for tensor, target in zip(source.tensors, targets)]
        keys = keys | {"general.file_type": u32(number)} if planned else keys
        if imatrix is not None:
            log.warning("--outtype %s does not use an importance matrix", kind)
    else:
        planned = plan_quantization(source, kind, imatrix)
        keys = quantized_metadata(keys, file_type(kind).number, _note(imatrix)) if planned else keys
    inputs = [*source.files, *([imatrix.path] if imatrix is not None and imatrix.path else [])]
    return planned, plan_output(path, keys, [plan.target for plan in planned], limits, inputs)


def _load_imatrix(imatrix: PathLike | Imatrix | None) -> Imatrix | None:
    from .imatrix.data import Imatrix
    from .imatrix.files import load_imatrix

    return imatrix if imatrix is None or isinstance(imatrix, Imatrix) else load_imatrix(imatrix)


def _note(imatrix: Imatrix | None) -> ImatrixNote | None:
    from .quantize.metadata import ImatrixNote

    if imatrix is None:
        return None
    return ImatrixNote(imatrix.path or "", imatrix.datasets[0] if imatrix.datasets else None, len(imatrix.entries), imatrix.chunk_count)


def _importance(imatrix: Imatrix | None, planned: Sequence[PlannedTensor]) -> ImportanceLookup | None:
    """How `stream` looks up importances. ImatrixError for an entry that does not fit its tensor, before any work."""
    if imatrix is None:
        return None
    found = [imatrix.entry(plan.source.name, plan.source.shape) is not None for plan in planned if not plan.kept]
    if sum(found) < len(found) / 2:
        log.warning("the importance matrix has entries for only %d of %d tensors: is it that of another model?", sum(found), len(found))
    return imatrix.importance


def plan_quantization(source: Source, type: str, imatrix: Imatrix | None = None, *, pure: bool = False,
                      custom_q: str | Sequence[str] = (), role_types: Mapping[str, str] | None = None,
                      token_embedding_type: str | None = None, output_tensor_type: str | None = None, leave_output_tensor: bool = False,
                      allow_requantize: bool = False, ignore_imatrix_rules: bool = False) -> list[PlannedTensor]:
    """What every tensor of `source` becomes for the preset `type`; see `quantize_model`. Nothing is read.

    Tensors of a checkpoint that are not quantized get the type the converter gives them (norms F32), as if it had been
    converted first. Those that it stores in blocks (MXFP4) stay so, unless `allow_requantize`.
    """
    from .convert.outtype import plan_outtype
    from .convert.source import CheckpointSource
    from .formats.ftypes import file_type
    from .quantize.overrides import Overrides
    from .quantize.plan import PlannedTensor, check_importance, check_supported, plan_preset

    preset, overrides = file_type(type), Overrides.of(custom_q, role_types, token_embedding_type, output_tensor_type)
    checkpoint = isinstance(source, CheckpointSource)
    converted = plan_outtype(source, "auto")[0] if checkpoint else source.tensors
    planned = plan_preset(converted, preset, source.metadata, overrides=overrides, pure=pure, leave_output_tensor=leave_output_tensor,
                          imatrix=imatrix is not None and bool(imatrix.entries), allow_requantize=allow_requantize or checkpoint)
    if checkpoint and not allow_requantize:
        planned = [PlannedTensor(plan.source, plan.source, "stored in blocks: kept") if plan.source.type.is_quantized else plan
                   for plan in planned]
    planned = [replace(plan, source=stored) for plan, stored in zip(planned, source.tensors)]
    check_supported(planned, decodable_types(), encodable_types())
    if not ignore_imatrix_rules:
        check_importance(planned, preset, None if imatrix is None else lambda t: imatrix.entry(t.name, t.shape) is not None)
    return planned


def quantize_model(src: PathLike, out: PathLike | None, type: str, imatrix: PathLike | Imatrix | None = None, *, pure: bool = False,
                   custom_q: str | Sequence[str] = (), role_types: Mapping[str, str] | None = None,
                   token_embedding_type: str | None = None, output_tensor_type: str | None = None, leave_output_tensor: bool = False,
                   allow_requantize: bool = False, ignore_imatrix_rules: bool = False, nan_to_zero: bool = False, threads: int = 0,
                   dry_run: bool = False, device: str = "cpu", progress: Progress | None = None) -> RunReport:
    """Quantize a GGUF file (also the first shard of a split one) or a checkpoint folder to one GGUF file.

    type: preset name or number (IQ4_K, Q4_K_M, 15), whose mix gives every tensor its type, as llama-quantize of ik_llama.cpp does.
    imatrix: file in either format, or a loaded one. ignore_imatrix_rules: do without where a type or preset demands one.
    pure: the preset's base type everywhere instead. custom_q: `REGEX=TYPE,REGEX=TYPE` (one text or several), which win over the mix;
    role_types: types by the keys of `quantize.overrides.ROLE_FLAGS`, where the mix lets them count. token_embedding_type,
    output_tensor_type: win over all. What counts for no tensor is logged as a warning.
    nan_to_zero: NaN and infinities in tensors that change their type become 0 and are counted (`zeroed` in the report of a tensor);
    without it they are a NonFiniteError that names the first one.
    dry_run: plan only, `out` may be None. device: "cpu", "cuda" (all GPUs), "cuda:1", "cuda:0,2" or "auto" (all GPUs, or the CPU
    where there is none). Returns types, sizes and errors of all tensors.
    """
    from .formats.ftypes import file_type
    from .formats.gguf.writer import GGUFWriter
    from .formats.output import refuse_same_file
    from .quantize.devices import find_devices
    from .quantize.metadata import quantized_metadata
    from .quantize.run import stream

    preset = file_type(type)
    devices = find_devices(device)
    imatrix = _load_imatrix(imatrix)
    with open_source(src) as source:
        planned = plan_quantization(source, type, imatrix, pure=pure, custom_q=custom_q, role_types=role_types,
                                    token_embedding_type=token_embedding_type, output_tensor_type=output_tensor_type,
                                    leave_output_tensor=leave_output_tensor, allow_requantize=allow_requantize,
                                    ignore_imatrix_rules=ignore_imatrix_rules)
        if nan_to_zero:
            planned = [replace(plan, nan_to_zero=True) for plan in planned]
        importance = _importance(imatrix, planned)
        if dry_run:
            return _report_plan(planned, progress)
        if out is None:
            raise UsageError("an output file is needed")
        refuse_same_file(out, [*source.files, *([imatrix.path] if imatrix is not None and imatrix.path else [])])
        metadata = quantized_metadata(source.metadata, preset.number, _note(imatrix))
        with GGUFWriter(out, metadata, [plan.target for plan in planned]) as sink:
            return stream(source, planned, sink, importance=importance, threads=threads, devices=devices, progress=progress)


def repack_model(src: PathLike, out: PathLike | None, *, pattern: str | Sequence[str] = (), undo: bool = False, threads: int = 0,
                 dry_run: bool = False, progress: Progress | None = None) -> RunReport:
    """Write a GGUF file (also the first shard of a split one) with its tensors in row-interleaved form, or with `undo` in plain form.

    pattern: regular expressions, of which one must be found in the name of a tensor; by default all tensors. Nothing is quantized, and
    undoing gives back every byte of the tensors. Where nothing can be changed no file is written: all tensors of the report are
    `.planned.kept` then. dry_run: plan only, `out` may be None.
    """
    from .formats.gguf.reader import open_gguf
    from .formats.gguf.writer import GGUFWriter
    from .formats.output import refuse_same_file
    from .quantize.metadata import quantized_metadata
    from .quantize.repack import plan_repack, repacked_file_type, stream_repacked

    with open_gguf(src) as source:
        planned = plan_repack(source.tensors, [pattern] if isinstance(pattern, str) else pattern, undo)
        if dry_run or all(plan.kept for plan in planned):
            return _report_plan(planned, progress)
        if out is None:
            raise UsageError("an output file is needed")
        refuse_same_file(out, source.files)
        stated = source.metadata.get("general.file_type")
        number = repacked_file_type(stated.data, planned, undo) if stated is not None else None
        with GGUFWriter(out, quantized_metadata(source.metadata, number), [plan.target for plan in planned]) as sink:
            return stream_repacked(source, planned, sink, threads=threads, progress=progress)


def quantize_stats(model: PathLike, types: Sequence[str] = (), imatrix: PathLike | Imatrix | None = None, *, include: Sequence[str] = (),
                   rows: int = 0, threads: int = 0, progress: StatsProgress | None = None) -> StatsReport:
    """What quantizing the tensors of a GGUF model or a checkpoint folder to each of `types` would lose; nothing is written.

    types: names; by default all plain quantized types there is a search for. include: regular expressions, of which one must be found
    in the name of a tensor. rows: measure about so many rows of each tensor, evenly spaced, instead of all. Returns sums of squared
    errors by tensor and type, see `quantize.stats`. UsageError if no tensor is left.
    """
    from .formats.types import ggml_type
    from .imatrix.data import Imatrix
    from .imatrix.files import load_imatrix
    from .quantize.stats import StatsReport, choose_tensors, choose_types, collect_stats

    chosen = choose_types([ggml_type(name) for name in types], encodable_types())
    if imatrix is not None and not isinstance(imatrix, Imatrix):
        imatrix = load_imatrix(imatrix)
    with open_source(model) as source:
        report = StatsReport(os.fspath(model), chosen, max(0, rows), None if imatrix is None else imatrix.path, source.files)
        return collect_stats(source, choose_tensors(source, include, decodable_types()), chosen, report,
                             importance=None if imatrix is None else imatrix.importance, threads=threads, progress=progress)


def _report_plan(planned: Sequence[PlannedTensor], progress: Progress | None) -> RunReport:
    """What a run reports of which nothing but the plan was made."""
    from .quantize.run import TensorReport

    report, progress = RunReport([TensorReport(plan) for plan in planned]), progress or Progress()
    progress.begin(planned)
    for index, tensor in enumerate(report.tensors):
        progress.tensor_done(index, tensor)
    progress.end(report)
    return report


def collect_imatrix(model: PathLike | Model, text: PathLike, out: PathLike | None = None, *, n_ctx: int = 512, chunks: int = -1,
                    output_format: str | None = None, process_output: bool = False, progress: Any = None) -> Imatrix:
    """Run `text` through `model` in windows of n_ctx tokens and collect sums of squares per input channel.

    text: a file, or the text itself (a string with a line break in it). Written to `out` (unless None) as legacy `.dat` or
    GGUF, by its suffix or `output_format` ("dat", "gguf").
    progress: callable as in `runtime.evaluate.windows.ProgressCallback`.
    """
    from .formats.output import refuse_same_file
    from .imatrix import collector
    from .imatrix.files import output_format_of, save_imatrix

    content, dataset = _text(text)
    with _model(model) as loaded:
        if out is not None:
            output_format_of(out, output_format)
            refuse_same_file(out, [*loaded.source.files, *([dataset] if dataset else [])])
        collected = collector.collect_imatrix(loaded, content, n_ctx=n_ctx, chunks=chunks, process_output=process_output,
                                              dataset=dataset, progress=progress)
    if out is not None:
        save_imatrix(collected, out, output_format)
    return collected


def measure_perplexity(model: PathLike | Model, text: PathLike | None, *, n_ctx: int = 512, chunks: int = -1,
                       kl_divergence_base: PathLike | None = None, kl_divergence: bool = False,
                       progress: Any = None) -> Perplexity | Divergence:
    """Perplexity of `model` on `text` over windows of n_ctx tokens, at most `chunks` of them if that is positive.

    text: a file, or the text itself (a string with a line break in it). kl_divergence_base alone: the predictions are also
    saved there. With kl_divergence: the model is compared with the predictions saved in kl_divergence_base, on the text in
    that file (`text` may be None). The results have `.perplexity` and `.uncertainty`, a divergence also `.mean_kld` and
    `.statistics`.
    """
    from .formats.output import refuse_same_file
    from .runtime.evaluate import divergence, perplexity

    with _model(model) as loaded:
        if kl_divergence:
            if kl_divergence_base is None:
                raise UsageError("kl_divergence needs kl_divergence_base")
            return divergence.measure_divergence(loaded, kl_divergence_base, chunks=chunks, progress=progress)
        if text is None:
            raise UsageError("a text is needed")
        content, path = _text(text)
        if kl_divergence_base is not None and path:
            refuse_same_file(kl_divergence_base, [path])
        return perplexity.measure_perplexity(loaded, content, n_ctx=n_ctx, chunks=chunks, save_logits=kl_divergence_base,
                                             progress=progress)


def generate(model: PathLike | Model, prompt: str | Sequence[int], n: int = 128, *, temperature: float = 0.8, top_k: int = 40,
             top_p: float = 0.95, min_p: float = 0.05, seed: int = 0, context: int = 0, ignore_eos: bool = False) -> Iterator[str]:
    """Text that follows `prompt` (or its tokens), in pieces as it comes: at most `n` tokens, or until the context is full if n < 0.

    The pieces together are the whole text. temperature 0 takes the most probable token each time; the same seed gives the same
    text. context: most tokens in all, prompt included; 0: as many as needed. `runtime.generate.generate_tokens` gives tokens instead.
    """
    from .runtime.generate import TextStream, end_tokens, generate_tokens, prompt_tokens
    from .runtime.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    with _model(model) as loaded:
        tokens = prompt_tokens(loaded.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        stream, end = TextStream(loaded.tokenizer), frozenset() if ignore_eos else end_tokens(loaded)
        for token in generate_tokens(loaded, tokens, n, sampling, context=context, end=end):
            if piece := stream.feed(token):
                yield piece
        if piece := stream.end():
            yield piece


def decode_torch(type: str, data: torch.Tensor, n_cols: int, *, as_weights: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`decode` on the device of `data`, uint8[rows, row_bytes]: float32[rows, n_cols] with the same bits, or rounded to `dtype`.

    For whole tensors, and I2_S, see `formats.torch_decode.decode_tensor_torch`.
    """
    import torch

    from .formats.torch_decode import decode_torch as decode

    return decode(type, data, n_cols, as_weights=as_weights, dtype=dtype or torch.float32)


def load_model(path: PathLike, device: str = "cpu", **options: Any) -> Model:
    """Open a GGUF model (plain, split, quantized) for evaluation: `.forward(token_ids)` gives logits float32[n, vocab].

    `.tokenizer` has `encode(text)` and `decode(ids)`. See `runtime.model.load_model`.
    """
    from .runtime.model import load_model as load

    return load(path, device, **options)


def random_model(spec: str, device: str = "cpu", **options: Any) -> Model:
    """A model of random weights, as in `llama-8b:IQ4_K`, that needs no file: for measuring speed. `options` as of `runtime.model.Model`.

    It has no tokenizer. See `runtime.synthetic` for shapes and for other types of single tensors.
    """
    from .runtime.model import Model
    from .runtime.synthetic import SyntheticSource

    return Model(SyntheticSource(spec), device, **options)


def benchmark_model(model: PathLike | Model, *, prompts: Sequence[int] = (512,), generations: Sequence[int] = (128,),
                    depths: Sequence[int] = (0,), repetitions: int = 5, progress: Any = None) -> list[Result]:
    """How fast a model evaluates prompts of `prompts` tokens, and generates `generations` tokens one by one, behind `depths` others.

    Results have `.test.label`, `.samples_ts` and `.avg_ts` in tokens/s, `.bytes_per_second` or `.flop_per_second`. progress: called
    with a line of text now and then. See `runtime.bench`.
    """
    from .runtime.bench import Test, run_test

    tests = [Test(n_prompt=n, depth=d) for n in prompts for d in depths] + [Test(n_gen=n, depth=d) for n in generations for d in depths]
    with _model(model) as loaded:
        return [run_test(loaded, test, repetitions=repetitions, progress=progress) for test in tests]


def _text(text: PathLike) -> tuple[str, str]:
    """(content, path) of a text file; (text, "") of a text given as such."""
    from .runtime.evaluate.windows import read_text

    if isinstance(text, str) and "\n" in text:
        return text, ""
    return read_text(text), os.fspath(text)


def _model(model: PathLike | Model):
    """`model` as a context manager: opened and closed here if it is a path, left open if the caller's."""
    from contextlib import nullcontext

    return load_model(model) if isinstance(model, (str, os.PathLike)) else nullcontext(model)
