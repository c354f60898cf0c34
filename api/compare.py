"""Compare models with the one that they were made of."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EvaluationError, UsageError, printable
from .bench import benchmark_model
from .models import opened_model, split_options, text_of
from .source import PathLike

if TYPE_CHECKING:
    from ..runtime.evaluate.chunks import ProgressCallback
    from ..runtime.evaluate.comparison import Comparison, ModelFigures, TextFigures
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.text_options import CompareOptions

_LAYOUT = 1  # of the files in the folder of a run


def compare_models(
    base: PathLike,
    models: Sequence[PathLike],
    texts: Sequence[PathLike],
    work: PathLike,
    *,
    options: CompareOptions | None = None,
    load: LoadOptions | None = None,
    progress: Callable[[str], ProgressCallback] | None = None,
    on_model: Callable[[ModelFigures, bool], None] | None = None,
    **keywords: Any,
) -> Comparison:
    """Compare models with `base` on texts: size, perplexity, KL divergence, speed and memory, and
    the tokens whose predictions differ most.

    base, models: GGUF files or checkpoint folders, all of one vocabulary. texts: files. work: a
    folder for the predictions of the base and for the figures of every model that is finished, so
    that an interrupted run resumes there. The predictions are removed at the end, unless keep is
    set. keywords: fields of `runtime.text_options.CompareOptions` and of
    `runtime.options.LoadOptions`; they win over `options` and `load`.

    - n_ctx, chunks, batch_tokens: see `measure_perplexity`.
    - compact: keep a tenth of the predictions, see `runtime.evaluate.compact_base`.
    - speed_prompt (512), speed_generation (32): tokens of the measurements of speed, 0: none.
    - worst (10): tokens listed for every model and text.

    progress(what) returns a callback for the chunks of one measurement. on_model(figures, resumed)
    is called for every model, the base first.
    """
    from ..formats.disk import output_error
    from ..runtime.evaluate.comparison import Comparison, short_labels
    from ..runtime.text_options import CompareOptions

    started = time.monotonic()
    o, load = split_options(compare_models, "", keywords, CompareOptions, options, load)
    if not texts:
        raise UsageError("a text is needed")
    if not models:
        raise UsageError("a model is needed, to compare with the base")
    folder = Path(work)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise output_error(error, folder) from None
    paths = [os.fspath(path) for path in (base, *models)]
    names = [_name(path) for path in paths]
    labels = [names[0], *short_labels(names[1:])]
    run = _Run(folder, [os.fspath(text) for text in texts], o, load, progress)
    run.identify(paths)
    figures = []
    for path, label in zip(paths, labels, strict=True):
        found, resumed = run.figures(path, label)
        figures.append(found)
        if on_model is not None:
            on_model(found, resumed)
    if not o.keep:
        run.remove_predictions()
    return Comparison(figures[0], tuple(figures[1:]), time.monotonic() - started)


class _Run:
    """One comparison and its folder. Files there are named by a digest of everything that their
    contents depend on, and appear only when they are whole.
    """

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str],
        options: CompareOptions,
        load: LoadOptions,
        progress: Callable[[str], ProgressCallback] | None,
    ):
        self.folder, self.options, self.load, self.progress = folder, options, load, progress
        self.texts = {path: text_of(path)[0] for path in texts}
        self.base = ""
        self.identities: dict[str, list] = {}
        self.vocabularies: dict[str, Sequence[str]] = {}

    def identify(self, paths: Sequence[str]) -> None:
        """Look at the base, which comes first, and at all models before any is measured.
        EvaluationError for one with another vocabulary.
        """
        self.base = paths[0]
        for path in paths:
            self._identity(path)
        for path in paths[1:]:
            # Lengths differ by padding, and finetunes give tokens to names that were reserved.
            pairs = list(zip(self.vocabularies[path], self.vocabularies[self.base]))
            if sum(own != of_base for own, of_base in pairs) > len(pairs) // 100:
                raise EvaluationError(
                    f"has another vocabulary than {printable(self.base, 400)}", file=path
                )

    def figures(self, path: str, label: str) -> tuple[ModelFigures, bool]:
        """Return the figures of a model, measured or from a run that was interrupted."""
        from dataclasses import replace

        from ..formats.output import PartFile
        from ..runtime.evaluate.comparison import figures_from_json

        file = self.folder / f"figures-{self._key(path, *self.texts, label=label)}.json"
        if file.exists():
            try:
                return figures_from_json(json.loads(file.read_text())), True
            except (ValueError, KeyError, TypeError):
                file.unlink()  # of another version
        missing = [t for t in self.texts if path != self.base and not self._predictions(t).exists()]
        if missing:
            with opened_model(self.base, self.load) as model:
                for text in missing:
                    self._measure_base(model, text)
        with opened_model(path, self.load) as model:
            found = self._describe(model, path, label)
            for text in self.texts:
                one = self._measure(model, path, text)
                found = replace(found, texts=(*found.texts, one))
        with PartFile(file) as part:
            part.write(json.dumps(asdict(found)).encode())
        return found, False

    def remove_predictions(self) -> None:
        for text in self.texts:
            self._predictions(text).unlink(missing_ok=True)

    def _measure(self, model: Model, path: str, text: str) -> TextFigures:
        from ..runtime.evaluate.chunks import Chunks, bos_token
        from ..runtime.evaluate.compact_base import open_base
        from ..runtime.evaluate.comparison import TextFigures, WorstTokens
        from ..runtime.evaluate.divergence import measure_divergence

        if path == self.base:
            return self._measure_base(model, text)
        base = open_base(self._predictions(text))
        chunks = Chunks(base.tokens, bos_token(model))
        worst = WorstTokens(model.tokenizer, base, chunks, self.options.worst)
        result = measure_divergence(
            model,
            base,
            batch_tokens=self.options.tokens_per_pass(self.load.ubatch),
            progress=self._callback(path, text),
            on_compared=worst if self.options.worst else None,
        )
        return TextFigures.of_model(text, result, worst.found())

    def _measure_base(self, model: Model, text: str) -> TextFigures:
        from ..runtime.evaluate.comparison import TextFigures
        from ..runtime.evaluate.perplexity import measure_perplexity

        o = self.options
        try:
            result = measure_perplexity(
                model,
                self.texts[text],
                n_ctx=o.n_ctx,
                chunks=o.chunks,
                batch_tokens=o.tokens_per_pass(self.load.ubatch),
                save_logits=self._predictions(text),
                compact=o.compact,
                progress=self._callback(self.base, text),
            )
        except EvaluationError as error:
            error.file = error.file or text  # one of several: say which
            raise
        return TextFigures.of_base(text, result)

    def _describe(self, model: Model, path: str, label: str) -> ModelFigures:
        from ..runtime import describe
        from ..runtime.evaluate.comparison import ModelFigures

        o, source, speeds = self.options, model.source, {}
        if o.speed_prompt or o.speed_generation:
            results = benchmark_model(
                model,
                prompts=(o.speed_prompt,) if o.speed_prompt else (),
                generations=(o.speed_generation,) if o.speed_generation else (),
                repetitions=2,
            )
            speeds = {bool(one.test.n_prompt): one.avg_ts for one in results}
        return ModelFigures(
            path,
            _name(path),
            label,
            describe.file_type_name(source),
            model.architecture,
            describe.n_parameters(source),
            sum(size for _, size, _ in self._identity(path)),  # without adapters
            describe.bits_per_weight(source),
            str(model.device),
            sum(memory.total for memory in model.memory(context=o.n_ctx)),
            o.speed_prompt,
            speeds.get(True),
            speeds.get(False),
        )

    def _callback(self, path: str, text: str) -> ProgressCallback | None:
        if self.progress is None:
            return None
        return self.progress(_name(path) + (f", {_name(text)}" if len(self.texts) > 1 else ""))

    def _predictions(self, text: str) -> Path:
        return self.folder / f"base-{self._key(self.base, text)}.kld"

    def _key(self, path: str, *texts: str, label: str = "") -> str:
        """Return a digest of a model, the base, texts and options."""
        parts = [
            _LAYOUT,
            label,
            [self._identity(one) for one in (path, self.base)],
            [hashlib.sha256(self.texts[text].encode()).hexdigest() for text in texts],
            list(texts) if label else [],
            {k: repr(v) for k, v in asdict(self.options).items() if k != "keep"},
            {k: repr(v) for k, v in asdict(self.load).items()},
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _identity(self, path: str) -> list:
        """Return what tells a model from another one without reading it: files, sizes, times."""
        from .source import open_source

        if path not in self.identities:
            with open_source(path) as source:
                files = [os.path.realpath(file) for file in source.files]
                tokens = source.metadata.get("tokenizer.ggml.tokens")
                self.vocabularies[path] = [] if tokens is None else tokens.data
            stats = [os.stat(file) for file in files]
            self.identities[path] = [
                [file, stat.st_size, stat.st_mtime_ns]
                for file, stat in zip(files, stats, strict=True)
            ]
        return self.identities[path]


def _name(path: str) -> str:
    name = os.path.basename(os.path.normpath(path))
    return name.removesuffix(".gguf").removesuffix(".txt")
