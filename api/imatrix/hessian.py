"""Collect the second moments of a model's inputs, and open a file of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...formats.options import checks_keywords
from ..models import opened_model, split_options, texts_of
from ..source import PathLike

if TYPE_CHECKING:
    from ...imatrix.moments.data import MomentInput
    from ...imatrix.moments.file import MomentsFile
    from ...imatrix.moments.options import HessianOptions
    from ...imatrix.texts import Text
    from ...runtime.evaluate.chunks import ProgressCallback
    from ...runtime.model import Model
    from ...runtime.options import LoadOptions


def collect_hessian(
    model: PathLike | Model,
    text: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    options: HessianOptions | None = None,
    load: LoadOptions | None = None,
    progress: ProgressCallback | None = None,
    on_sizes: Callable[[Sequence[MomentInput], int], None] | None = None,
    **keywords: Any,
) -> MomentsFile:
    """Run `text` through `model` in chunks, collect E[x x^T] of the inputs of every weight matrix,
    write it to `out` and return that file, opened.

    model: a path, opened with `load`, or an open model. text: a file, or the text itself (a string
    with a line break in it), or "default", or several of them. keywords: fields of
    `imatrix.moments.options.HessianOptions` and, for a path, of `runtime.options.LoadOptions`.

    - n_ctx (512): tokens per chunk. chunks: at most this many chunks of each text. from_chunk: skip
      this many chunks of each text. batch_tokens (2048): tokens per pass, in whole chunks.
    - The last fifth of the chunks of each text is held out: `quantize` judges by it.
    - experts: "each" has statistics for every expert, "layer" one for gate and up of all experts of
      a layer. process_output, output_name: include the output matrix.
    - correlations: "f32" or "bf16", how the file stores them.
    - output_frequency: write `<out>.resume` after this many chunks (None: once a minute). A run
      with `resume`, and all else equal, continues there and ends with the same bytes.
    - precision: on a GPU "f16" by default. If activations exceed its range, collecting starts again
      in bfloat16, with a warning.

    progress: called after every chunk. on_sizes: called before the run with all inputs and the
    bytes of a correlation.
    """
    from ...formats.output import check_output, refuse_same_file
    from ...imatrix.moments.collector import collect_moments, survey_inputs, tokens_of_texts
    from ...imatrix.moments.file import load_moments
    from ...imatrix.moments.options import HessianOptions
    from ...imatrix.moments.saving import MomentSaver
    from ...imatrix.texts import Text

    options, load = split_options(collect_hessian, model, keywords, HessianOptions, options, load)
    texts = [Text(*one) for several in texts_of(text) for one in several]
    if not texts:
        raise UsageError("there is no text to collect from")
    check_output(out)
    with opened_model(model, load, collects=True) as loaded:
        refuse_same_file(out, [*loaded.source.files, *(one.name for one in texts if one.name)])
        tokens = tokens_of_texts(loaded, texts, options)
        total = survey_inputs(loaded, options)
        if on_sizes is not None:
            on_sizes(list(total.inputs.values()), 2 if options.correlations == "bf16" else 4)
        saver = MomentSaver(out, _run(loaded, texts, options), options.output_frequency)
        total = saver.start(total, options.resume)
        total = collect_moments(loaded, texts, options, total, progress=progress, on_pass=saver)
        saver.run["precision"] = loaded.precision
        said = [
            {"name": os.path.basename(one.name), "sha256": _sha256(one), "tokens": n}
            for one, n in zip(texts, tokens, strict=True)
        ]
        saver.finish(total, said, options.correlations)
    return load_moments(out)


@checks_keywords
def load_hessian(path: PathLike) -> MomentsFile:
    """Open a file of second moments, as `collect_hessian` writes them. Matrices are read when they
    are asked for.
    """
    from ...imatrix.moments.file import load_moments

    return load_moments(path)


def _sha256(text: Text) -> str:
    return hashlib.sha256(str(text.content).encode("utf-8", "surrogatepass")).hexdigest()


def _run(model: Model, texts: Sequence[Text], options: HessianOptions) -> dict[str, str]:
    """Return everything that the sums depend on as text; the model and the texts as SHA-256."""
    import torch

    from ...imatrix.files.snapshot import model_fingerprint
    from ...version import __version__

    return {
        "model": model_fingerprint(model.source),
        "text": " ".join(map(_sha256, texts)),
        "device": str(model.device),
        "precision": model.precision,
        "placement": str(model.weights.placement.request),
        "switches": str(model.weights.switches),
        "iqforge": __version__,
        "torch": torch.__version__,
        **{
            name: str(getattr(options, name))
            for name in (
                "n_ctx",
                "chunks",
                "from_chunk",
                "batch_tokens",
                "parse_special",
                "process_output",
                "output_name",
                "experts",
            )
        },
    }
