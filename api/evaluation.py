"""Measure models on texts: perplexity, divergence and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .models import opened_model, split_options, text_of
from .source import PathLike

if TYPE_CHECKING:
    from ..runtime.evaluate.chunks import ProgressCallback
    from ..runtime.evaluate.divergence import Divergence, Statistics
    from ..runtime.evaluate.perplexity import Perplexity
    from ..runtime.evaluate.tasks import TaskItem, TaskScore
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.text_options import ChunkOptions, PerplexityOptions


def measure_perplexity(
    model: PathLike | Model,
    text: PathLike | None,
    *,
    options: PerplexityOptions | None = None,
    load: LoadOptions | None = None,
    progress: ProgressCallback | None = None,
    on_chunk: Callable[[int, Statistics], None] | None = None,
    against: PathLike | Model | None = None,
    prompt: str | None = None,
    **keywords: Any,
) -> Perplexity | Divergence:
    """Measure the perplexity of `model` on `text` over chunks of n_ctx tokens.

    model: a path, opened with `load`, or an open model. text: a file, or the text itself (a string
    with a line break in it). prompt: the text itself, of any kind, instead of `text`. keywords:
    fields of `runtime.text_options.PerplexityOptions` and, for a path, of
    `runtime.options.LoadOptions`; they win over `options` and `load`.

    - n_ctx (512): tokens per chunk. chunks: at most this many chunks, if positive. batch_tokens
      (2048): tokens per pass, in whole chunks.
    - ppl_stride: score the last ppl_stride tokens of windows that begin every ppl_stride tokens, as
      `runtime.evaluate.strided` describes.
    - kl_divergence_base: a file that the predictions are saved to. With kl_divergence the model is
      compared with the predictions in that file, on its text (`text` may be None); on_chunk is
      called with (chunk, statistics so far).
    - kl_divergence_compact: save a tenth of that; see `runtime.evaluate.compact_base`.
    - against: a model, or its path, that is evaluated at the same time and compared with, without
      a base file.
    - device, precision, threads, ...: see `load_model`.

    Results have `.perplexity` and `.uncertainty`, a divergence also `.mean_kld` and `.statistics`.
    """
    from ..formats.output import refuse_same_file
    from ..runtime.evaluate import divergence, perplexity
    from ..runtime.text_options import PerplexityOptions

    options, load = split_options(
        measure_perplexity, model, keywords, PerplexityOptions, options, load
    )
    base, batch = options.kl_divergence_base, options.tokens_per_pass(load.ubatch)
    if against is not None and (base is not None or options.kl_divergence or options.ppl_stride):
        raise UsageError("against needs no base file, and cannot be given with ppl_stride")
    if options.kl_divergence_compact and (base is None or options.kl_divergence):
        raise UsageError("kl_divergence_compact is for a base file that is written")
    if options.kl_divergence:
        if base is None:
            raise UsageError("kl_divergence needs kl_divergence_base")
        with opened_model(model, load) as loaded:
            return divergence.measure_divergence(
                loaded,
                base,
                chunks=options.chunks,
                batch_tokens=batch,
                progress=progress,
                on_chunk=on_chunk,
            )
    content, path = _content(text, prompt)
    with _named(path):
        if against is not None:
            with opened_model(against, load) as other, opened_model(model, load) as loaded:
                return divergence.measure_divergence_between(
                    loaded,
                    other,
                    content,
                    n_ctx=options.n_ctx,
                    chunks=options.chunks,
                    batch_tokens=batch,
                    progress=progress,
                    on_chunk=on_chunk,
                )
        if options.ppl_stride:
            if base is not None:
                raise UsageError(
                    "a base file has no windows that overlap: it cannot have ppl_stride"
                )
            from ..runtime.evaluate.strided import measure_strided

            with opened_model(model, load) as loaded:
                return measure_strided(
                    loaded,
                    content,
                    options.ppl_stride,
                    n_ctx=options.n_ctx,
                    chunks=options.chunks,
                    batch_tokens=options.batch_tokens,
                    progress=progress,
                )
        if base is not None and path:
            refuse_same_file(base, [path])
        with opened_model(model, load) as loaded:
            return perplexity.measure_perplexity(
                loaded,
                content,
                n_ctx=options.n_ctx,
                chunks=options.chunks,
                batch_tokens=batch,
                save_logits=base if loaded.is_first else None,
                compact=options.kl_divergence_compact,
                progress=progress,
            )


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the file of the text, if it has one, to the error of a text that is too short."""
    from ..runtime.evaluate.chunks import ShortTextError

    try:
        yield
    except ShortTextError as error:
        raise ShortTextError(error.message, file=path or None) from None


def _content(text: PathLike | None, prompt: str | None) -> tuple[str, str]:
    """Return the text to evaluate, and the path of its file or ""."""
    from ..formats.arguments import instance

    if text is not None and prompt is not None:
        raise UsageError("a text and a prompt exclude each other")
    if prompt is not None:
        return instance("prompt", prompt, str, "a text"), ""
    if text is None:
        raise UsageError("a text is needed")
    return text_of(text)


def measure_tasks(
    model: PathLike | Model,
    file: PathLike,
    kind: str,
    n_tasks: int | None = None,
    *,
    options: ChunkOptions | None = None,
    load: LoadOptions | None = None,
    on_task: Callable[[int, TaskItem], None] | None = None,
    **keywords: Any,
) -> TaskScore:
    """Measure how often `model` chooses the right answer in a file of tasks.

    kind: "hellaswag", "winogrande" or "multiple-choice"; see `runtime.evaluate.task_files` for the
    formats. n_tasks: at most this many of them, drawn at random, always the same ones (None: 400 of
    HellaSwag, otherwise all; 0: all). keywords: fields of `runtime.text_options.ChunkOptions`
    (n_ctx, the most tokens of a task; batch_tokens) and, for a path, of
    `runtime.options.LoadOptions`. on_task(index, item) is called after each task.

    Results have `.accuracy` and `.error`, `.random_chance`, and `.items` with the scores.
    """
    from ..formats.arguments import path, whole_number
    from ..runtime.evaluate import task_files, tasks
    from ..runtime.text_options import HELLASWAG_TASKS, ChunkOptions

    readers = {
        "hellaswag": task_files.read_hellaswag,
        "winogrande": task_files.read_winogrande,
        "multiple-choice": task_files.read_multiple_choice,
    }
    options, load = split_options(measure_tasks, model, keywords, ChunkOptions, options, load)
    if kind not in readers:
        raise UsageError(f"kind is {kind!r}, expected {', '.join(readers)}")
    if n_tasks is None:
        n_tasks = HELLASWAG_TASKS if kind == "hellaswag" else 0
    found = readers[kind](path("file", file), whole_number("n_tasks", n_tasks, 0))
    with opened_model(model, load) as loaded:
        return tasks.measure_tasks(
            loaded,
            found,
            n_ctx=options.n_ctx,
            batch_tokens=options.tokens_per_pass(load.ubatch),
            on_task=on_task,
        )
