"""The roof: importance matrices, collected from a text with a model, merged, converted and
compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError, printable
from .models import opened_model, text_of
from .source import PathLike, loaded_imatrix

if TYPE_CHECKING:
    from ..imatrix.compare import Comparison
    from ..imatrix.coverage import Coverage
    from ..imatrix.data import Imatrix
    from ..imatrix.similarity import LayerSimilarity
    from ..imatrix.statistics import TensorStatistics
    from ..imatrix.texts import Text
    from ..runtime.evaluate.perplexity import Perplexity
    from ..runtime.model import Model


def collect_imatrix(
    model: PathLike | Model,
    text: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    *,
    n_ctx: int = 512,
    chunks: int = -1,
    from_chunk: int = 0,
    text_weights: Sequence[float] | None = None,
    output_format: str | None = None,
    process_output: bool = False,
    output_name: str = "output.weight",
    parse_special: bool = False,
    compute_perplexity: bool = True,
    batch_tokens: int = 2048,
    cold_experts: str = "prior",
    min_tokens: int = 128,
    prior_tokens: float = 32.0,
    dataset: str | None = None,
    in_files: Sequence[PathLike | Imatrix] = (),
    in_weights: Sequence[float] | None = None,
    weighting: str = "tokens",
    output_frequency: int | None = None,
    save_frequency: int = 0,
    resume: bool = False,
    progress: Any = None,
    similarity: LayerSimilarity | None = None,
    on_perplexity: Callable[[Perplexity], None] | None = None,
    on_coverage: Callable[[Coverage], None] | None = None,
    force: bool = False,
) -> Imatrix:
    """Run `text` through `model` in windows of n_ctx tokens and collect sums of squares per input
    channel.

    text: a file, or the text itself (a string with a line break in it, or any with a `dataset` to
    name it by); or several of them, each in windows of its own. Written to `out` (unless None) as
    legacy `.dat` or GGUF, by its suffix or `output_format` ("dat", "gguf"). text_weights: how many
    times the tokens of each text count (1). chunks, from_chunk: at most so many windows of each
    text, behind so many. process_output: also the matrix `output_name`. parse_special: the text of
    a control token is that token. batch_tokens: tokens that go through the model at a time, in
    whole windows. cold_experts: what is written of experts that saw fewer than `min_tokens` tokens
    (see `imatrix.cold_experts`): "prior" and "neighbours" mix in what others saw, as if it was
    `prior_tokens` tokens; "all-experts" shows every token to every expert while collecting; "none"
    leaves what was seen. on_coverage gets what experts saw, before anything is mixed in. in_files:
    importance matrices to add to, `in_weights` times (see `merge_imatrices`). output_frequency:
    write what there is after so many windows (None: 10, but at most once a minute; 0: only at the
    end), and with it `<out>.resume`, from which a run with `resume` and all else equal goes on; it
    ends with the same bytes. save_frequency: also keep `<out>.at_<windows>` every so many.
    progress: callable as in `runtime.evaluate.windows.ProgressCallback`. `similarity` takes in how
    much layers change their input (see `imatrix.similarity`), on_perplexity gets that of all
    windows at the end. force: add `in_files` that seem to belong to another model.
    """
    from ..formats.output import refuse_same_file
    from ..imatrix import collector
    from ..imatrix.all_experts import router_rows
    from ..imatrix.belongs import check_belongs
    from ..imatrix.cold_experts import fill_cold_experts
    from ..imatrix.coverage import measure_coverage
    from ..imatrix.data import Imatrix
    from ..imatrix.files.saving import Saver
    from ..imatrix.merge import check_arguments
    from ..imatrix.merge import merge_imatrices as merge
    from ..imatrix.texts import Text
    from ..runtime.arguments import instance

    given = [text] if isinstance(text, (str, os.PathLike)) else list(text)
    instance("dataset", dataset, (str, type(None)), "a name")
    if not given or (text_weights is not None and len(text_weights) != len(given)):
        raise UsageError(f"{len(text_weights or ())} weights are given for {len(given)} texts")
    texts = [
        Text(*(text_of(one) if dataset is None else (one, dataset)), weight)
        for one, weight in zip(given, text_weights or [1.0] * len(given), strict=True)
    ]
    loaded_files = [loaded_imatrix(file) for file in in_files]

    def combined(imatrix: Imatrix) -> Imatrix:
        return fill_cold_experts(
            merged(imatrix),
            cold_experts,
            least=min_tokens,
            prior_tokens=prior_tokens,
            routers=routers,
        )

    def merged(imatrix: Imatrix) -> Imatrix:
        weights = None if in_weights is None else [*in_weights, 1.0]
        return (
            merge([*loaded_files, imatrix], weights, chunk_size=n_ctx, weighting=weighting)
            if loaded_files
            else imatrix
        )

    if loaded_files or in_weights:  # errors before any work
        check_arguments(
            loaded_files,
            [1.0] * len(loaded_files) if in_weights is None else in_weights,
            None,
            weighting,
        )
    with opened_model(model) as loaded:
        loaded_files = [
            check_belongs(file, loaded.source.tensors, force=force) for file in loaded_files
        ]
        routers = router_rows(loaded) if cold_experts == "neighbours" else None
        fill_cold_experts(Imatrix(), cold_experts, least=min_tokens, prior_tokens=prior_tokens)
        settings = {
            "n_ctx": n_ctx,
            "from_chunk": from_chunk,
            "process_output": process_output,
            "output_name": output_name,
            "parse_special": parse_special,
            "compute_perplexity": compute_perplexity,
            "batch_tokens": batch_tokens,
            "all_experts": cold_experts == "all-experts",
        }
        saver = None
        if out is not None:
            refuse_same_file(
                out,
                [
                    *loaded.source.files,
                    *(one.name for one in texts if one.name),
                    *(i.path for i in loaded_files if i.path),
                ],
            )
            run = _run(loaded, texts, chunks, settings | {"similarity": similarity is not None})
            saver = Saver(
                out,
                output_format,
                run,
                every=output_frequency,
                keep_every=save_frequency,
                combined=combined,
            )
        elif resume or save_frequency:
            raise UsageError("resume and save_frequency need an output file")
        collected = collector.collect_imatrix(
            loaded,
            texts,
            chunks=chunks,
            progress=progress,
            checkpoint=saver,
            similarity=similarity,
            on_perplexity=on_perplexity,
            start=saver.start(resume) if saver is not None else None,
            **settings,
        )
    if on_coverage is not None:
        on_coverage(measure_coverage(merged(collected), min_tokens))
    return saver.finish(collected) if saver is not None else combined(collected)


def _run(
    model: Model, texts: Sequence[Text], chunks: int, settings: dict[str, Any]
) -> dict[str, str]:
    """All that sums depend on, in words, the model's and the texts' as SHA-256."""
    import torch

    from ..imatrix.files.snapshot import model_fingerprint
    from ..version import __version__

    hashes = [
        hashlib.sha256(text.content.encode("utf-8", "surrogatepass")).hexdigest() for text in texts
    ]
    return {
        "model": model_fingerprint(model.source),
        "text": " ".join(hashes),
        "weights": str([text.weight for text in texts]),
        "device": str(model.device),
        "precision": model.precision,
        "placement": str(model.weights.placement.request),
        "switches": str(model.weights.switches),
        "cache": str(model.cache),
        "iqforge": __version__,
        "torch": torch.__version__,
        **{name: str(value) for name, value in settings.items()},
        **({"chunks": str(chunks)} if len(texts) > 1 else {}),
    }  # of one text, the first windows are the same, however many there are


def merge_imatrices(
    files: Sequence[PathLike | Imatrix],
    out: PathLike | None = None,
    *,
    weights: Sequence[float] | None = None,
    chunk_size: int | None = None,
    weighting: str = "tokens",
    output_format: str | None = None,
    cold_experts: str = "none",
    min_tokens: int = 128,
    prior_tokens: float = 32.0,
    force: bool = False,
) -> Imatrix:
    """The sum of importance matrices of one model, of either layout, written to `out` unless that
    is None.

    weights: how many times each counts (1). chunk_size: tokens of a chunk, which is what a `.dat`
    file counts; by default that of the first `.gguf` file, else 512. weighting: "tokens", or
    "calls" as ik_llama.cpp adds them, see `imatrix.merge`. cold_experts: "prior" mixes into experts
    that saw fewer than `min_tokens` tokens what the others saw, see `collect_imatrix`.
    force: add up files that seem to belong to different models.
    """
    from ..formats.output import refuse_same_file
    from ..imatrix.belongs import check_same_model
    from ..imatrix.cold_experts import fill_cold_experts
    from ..imatrix.files.load import output_format_of, save_imatrix
    from ..imatrix.merge import DEFAULT_CHUNK, as_tokens
    from ..imatrix.merge import merge_imatrices as merge

    parts = [loaded_imatrix(file) for file in files]
    check_same_model(parts, force=force)
    merged = merge(parts, weights, chunk_size=chunk_size, weighting=weighting)
    if out is not None:
        refuse_same_file(out, [part.path for part in parts if part.path])
        if output_format_of(out, output_format) == "gguf":
            merged = as_tokens(merged, chunk_size or DEFAULT_CHUNK)
    merged = fill_cold_experts(merged, cold_experts, least=min_tokens, prior_tokens=prior_tokens)
    if out is not None:
        save_imatrix(merged, out, output_format)
    return merged


def convert_imatrix(
    src: PathLike, out: PathLike, output_format: str | None = None, *, chunk_size: int | None = None
) -> Imatrix:
    """Write the importance matrix `src` in the layout of `output_format` ("dat", "gguf"), or that
    of the name `out`; returns it.

    chunk_size: tokens of a call, which is all that a `.dat` file counts (512). UsageError for one
    that contradicts a `.gguf` file.
    """
    from ..formats.output import refuse_same_file
    from ..imatrix.files.load import output_format_of, save_imatrix
    from ..imatrix.merge import DEFAULT_CHUNK, as_tokens

    refuse_same_file(out, [src])
    imatrix = loaded_imatrix(src)
    if chunk_size is not None and (
        chunk_size < 2 or (not imatrix.counts_calls and chunk_size != imatrix.chunk_size)
    ):
        of_file = (
            ""
            if imatrix.counts_calls
            else f"; {printable(src)} has chunks of {imatrix.chunk_size} tokens"
        )
        raise UsageError(f"the chunk size is {chunk_size}, expected at least 2 tokens{of_file}")
    if output_format_of(out, output_format) == "gguf":
        imatrix = as_tokens(imatrix, chunk_size or DEFAULT_CHUNK)
    save_imatrix(imatrix, out, output_format)
    return imatrix


def compare_imatrices(a: PathLike | Imatrix, b: PathLike | Imatrix) -> Comparison:
    """Cosine and relative difference of every entry of two importance matrices of one model, the
    worst first; see `imatrix.compare`.
    """
    from ..imatrix.compare import compare

    return compare(loaded_imatrix(a), loaded_imatrix(b))


def imatrix_coverage(imatrix: PathLike | Imatrix, min_tokens: int = 128) -> Coverage:
    """How many tokens each expert saw, those with fewer than `min_tokens` called cold; see
    `imatrix.coverage`.
    """
    from ..imatrix.coverage import measure_coverage

    return measure_coverage(loaded_imatrix(imatrix), min_tokens)


def imatrix_statistics(imatrix: PathLike | Imatrix) -> list[TensorStatistics]:
    """Figures of every entry, by kind of tensor; see `imatrix.statistics`, also for those of
    layers.
    """
    from ..imatrix.statistics import tensor_statistics

    return tensor_statistics(loaded_imatrix(imatrix))
