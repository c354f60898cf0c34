"""The roof: importance matrices, collected from a text with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api_runtime import opened_model, text_of
from .api_source import PathLike

if TYPE_CHECKING:
    from .imatrix.data import Imatrix
    from .runtime.model import Model


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

    content, dataset = text_of(text)
    with opened_model(model) as loaded:
        if out is not None:
            output_format_of(out, output_format)
            refuse_same_file(out, [*loaded.source.files, *([dataset] if dataset else [])])
        collected = collector.collect_imatrix(loaded, content, n_ctx=n_ctx, chunks=chunks, process_output=process_output,
                                              dataset=dataset, progress=progress)
    if out is not None:
        save_imatrix(collected, out, output_format)
    return collected
