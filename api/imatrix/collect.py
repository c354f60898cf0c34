"""Collect an importance matrix from texts with a model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..models import opened_model, split_options, texts_of
from ..source import PathLike, loaded_imatrix

if TYPE_CHECKING:
    import numpy as np

    from ...imatrix.coverage import Coverage
    from ...imatrix.data import Imatrix
    from ...imatrix.options import CollectOptions
    from ...imatrix.similarity import LayerSimilarity
    from ...imatrix.texts import Text
    from ...runtime.evaluate.chunks import ProgressCallback
    from ...runtime.evaluate.perplexity import Perplexity
    from ...runtime.model import Model
    from ...runtime.options import LoadOptions


def collect_imatrix(
    model: PathLike | Model,
    text: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    *,
    options: CollectOptions | None = None,
    load: LoadOptions | None = None,
    dataset: str | None = None,
    progress: ProgressCallback | None = None,
    similarity: LayerSimilarity | None = None,
    on_perplexity: Callable[[Perplexity], None] | None = None,
    on_coverage: Callable[[Coverage], None] | None = None,
    **keywords: Any,
) -> Imatrix:
    """Run `text` through `model` in chunks and collect sums of squares per input channel.

    model: a path, opened with `load`, or an open model. text: a file, or the text itself (a string
    with a line break in it, or any with a `dataset` to name it by), or "default"; or several of
    them, each cut into chunks separately. The result is written to `out`, unless that is None, as
    legacy `.dat` or GGUF. keywords: fields of `imatrix.options.CollectOptions` and, for a path, of
    `runtime.options.LoadOptions`; they win over `options` and `load`.

    - n_ctx (512): tokens per chunk. chunks: at most this many chunks of each text. from_chunk:
      skip this many chunks of each text. batch_tokens (2048): tokens per pass, in whole chunks.
    - text_weights: how many times the tokens of each text count (1).
    - output_format: "dat" or "gguf", else by the suffix of `out`.
    - process_output, output_name: include the output matrix of this name. parse_special: read the
      text of a control token as that token.
    - cold_experts: what is written for experts that saw fewer than `min_tokens` tokens (see
      `imatrix.cold_experts`): "prior" (default) and "neighbours" mix in what others saw, as if that
      was `prior_tokens` tokens; "all-experts" shows every token to every expert while collecting;
      "none" writes what was seen.
    - in_files, in_weights, weighting: importance matrices to add to, see `merge_imatrices`.
    - output_frequency: write the sums so far after this many chunks (None: 10, but at most once a
      minute; 0: only at the end) and `<out>.resume` with them. A run with `resume`, and all else
      equal, continues there and ends with the same bytes. save_frequency: also keep
      `<out>.at_<chunks>` every this many chunks.
    - device, precision, threads, ...: see `load_model`. Products are observed in float32 on the
      CPU, and on a GPU in float16 by default. If activations exceed its range, collecting starts
      again in bfloat16, with a warning.

    progress: called after every chunk, see `runtime.evaluate.chunks`. similarity: measures how
    much layers change their input, see `imatrix.similarity`. on_perplexity: called with the
    perplexity of all chunks. on_coverage: called with what experts saw, before anything is mixed
    in.
    """
    from ...formats.arguments import instance
    from ...formats.output import refuse_same_file
    from ...imatrix.all_experts import router_rows
    from ...imatrix.belongs import check_belongs
    from ...imatrix.collecting import collect
    from ...imatrix.coverage import measure_coverage
    from ...imatrix.data import Imatrix
    from ...imatrix.files.saving import Saver
    from ...imatrix.merge import check_arguments
    from ...imatrix.options import CollectOptions

    options, load = split_options(collect_imatrix, model, keywords, CollectOptions, options, load)
    given = [text] if isinstance(text, (str, os.PathLike)) else list(text)
    instance("dataset", dataset, (str, type(None)), "a name")
    texts = _texts(given, options.text_weights, dataset)
    files = [loaded_imatrix(file) for file in options.in_files]
    if files or options.in_weights:  # errors before any work
        weights = [1.0] * len(files) if options.in_weights is None else options.in_weights
        check_arguments(files, weights, None, options.weighting)
    if options.cold_experts == "all-experts" or similarity is not None:
        load = replace(load, precision="f32")  # these see the reference path alone
    with opened_model(model, load, collects=True) as loaded:
        tensors = loaded.source.tensors
        files = [check_belongs(file, tensors, force=options.force) for file in files]
        routers = router_rows(loaded) if options.cold_experts == "neighbours" else None
        others = _Others(files, options, routers)
        others.filled(Imatrix())  # errors before any work
        saver = start = None
        if out is not None:
            read = [one.name for one in texts if one.name] + [i.path for i in files if i.path]
            refuse_same_file(out, [*loaded.source.files, *read])
            saver = Saver(
                out,
                options.output_format,
                _run(loaded, texts, options, similarity is not None),
                every=options.output_frequency,
                keep_every=options.save_frequency,
                combined=others.combined,
            )
            start = saver.start(options.resume) if loaded.is_first else None
            if loaded.peers is not None:
                start = loaded.peers.from_first(start)
        elif options.resume or options.save_frequency:
            raise UsageError("resume and save_frequency need an output file")
        collected = collect(
            loaded,
            texts,
            options,
            progress=progress,
            on_pass=saver if loaded.is_first else None,
            similarity=similarity,
            on_perplexity=on_perplexity,
            start=start,
        )
        is_first = loaded.is_first
    if on_coverage is not None:
        on_coverage(measure_coverage(others.merged(collected), options.min_tokens))
    return saver.finish(collected) if saver is not None and is_first else others.combined(collected)


@dataclass(frozen=True)
class _Others:
    """What a collected importance matrix becomes with `files`, and with what others say of its cold
    experts. routers: rows of routers, for methods that compare experts.
    """

    files: Sequence[Imatrix]
    options: CollectOptions
    routers: Mapping[str, np.ndarray] | None

    def merged(self, imatrix: Imatrix) -> Imatrix:
        """Return the sum of all."""
        from ...imatrix.merge import merge_imatrices

        if not self.files:
            return imatrix
        o = self.options
        weights = None if o.in_weights is None else [*o.in_weights, 1.0]
        parts = [*self.files, imatrix]
        return merge_imatrices(parts, weights, chunk_size=o.n_ctx, weighting=o.weighting)

    def filled(self, imatrix: Imatrix) -> Imatrix:
        """Return it with something for cold experts."""
        from ...imatrix.cold_experts import fill_cold_experts

        o = self.options
        return fill_cold_experts(
            imatrix,
            o.cold_experts,
            least=o.min_tokens,
            prior_tokens=o.prior_tokens,
            routers=self.routers,
        )

    def combined(self, imatrix: Imatrix) -> Imatrix:
        """Return what is written."""
        return self.filled(self.merged(imatrix))


def _texts(
    given: Sequence[PathLike], weights: Sequence[float] | None, dataset: str | None
) -> list[Text]:
    from ...imatrix.texts import Text

    if not given:
        raise UsageError("there is no text to collect from")
    if weights is not None and len(weights) != len(given):
        raise UsageError(f"{len(weights)} weights are given for {len(given)} texts")
    contents = (
        texts_of(given) if dataset is None else [[(os.fspath(one), dataset)] for one in given]
    )
    return [
        Text(*one, weight)
        for several, weight in zip(contents, weights or [1.0] * len(given), strict=True)
        for one in several
    ]


def _run(
    model: Model, texts: Sequence[Text], options: CollectOptions, similarity: bool
) -> dict[str, str]:
    """Return everything that the sums depend on as text; the model and the texts as SHA-256."""
    import torch

    from ...imatrix.files.snapshot import model_fingerprint
    from ...version import __version__

    hashes = [
        hashlib.sha256(str(text.content).encode("utf-8", "surrogatepass")).hexdigest()
        for text in texts
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
        "n_ctx": str(options.n_ctx),
        "from_chunk": str(options.from_chunk),
        "process_output": str(options.process_output),
        "output_name": str(options.output_name),
        "parse_special": str(options.parse_special),
        "compute_perplexity": str(options.compute_perplexity),
        "batch_tokens": str(options.batch_tokens),
        "all_experts": str(options.cold_experts == "all-experts"),
        "similarity": str(similarity),
        # of one text, the first chunks are the same, however many there are
        **({"chunks": str(options.chunks)} if len(texts) > 1 else {}),
    }
