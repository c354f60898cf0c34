"""Measure the speed of models, with random weights or of a file, and profile them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats.options import checks_keywords
from .models import check_load_keywords, open_model, opened_model, split_options
from .source import PathLike

if TYPE_CHECKING:
    import torch

    from ..formats.source import Source
    from ..runtime.bench.bench import Result, Test
    from ..runtime.bench.options import BenchOptions, SweepOptions
    from ..runtime.bench.sweep import SweepRow
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.profile.trace import Pass
    from ..runtime.state.cache import CacheSettings


@checks_keywords
def random_source(spec: str) -> Source:
    """Return the source that `random_model` opens: metadata, and tensors whose values are made when
    they are read.
    """
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..formats.arguments import instance
    from ..runtime.bench.synthetic import SyntheticSource

    return SyntheticSource(instance("spec", spec, str, "SHAPE:TYPE"))


def random_model(
    spec: str,
    device: str | torch.device | None = None,
    *,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> Model:
    """Return a model of random weights, as in `llama-8b:IQ4_K`, that needs no file: for measuring
    speed. Takes the options of `load_model`.

    It has no tokenizer. See `runtime.bench.synthetic` for shapes, and for other types of single
    tensors.
    """
    check_load_keywords(random_model, keywords)
    source = random_source(spec)
    keywords = keywords if device is None else keywords | {"device": device}
    return open_model(spec, options, source=source, **keywords)


@checks_keywords
def write_random_model(
    spec: str, out: PathLike, *, progress: Callable[[int], None] | None = None
) -> Path:
    """Write a model of random weights, as in `llama-8b:IQ4_K`, as a GGUF file with a small
    vocabulary, which other engines open too, and return its path.

    progress: called with the number of bytes written since the last call. The file gets its name
    when it is whole. OutputError if the disk has too little space.
    """
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..runtime.bench.write import write_random_model

    return write_random_model(spec, out, progress=progress)


def benchmark_model(
    model: PathLike | Model,
    *,
    options: BenchOptions | None = None,
    load: LoadOptions | None = None,
    cache: CacheSettings | None = None,
    progress: Callable[[str], None] | None = None,
    on_result: Callable[[Result], None] | None = None,
    **keywords: Any,
) -> list[Result]:
    """Measure how fast a model evaluates prompts and generates tokens.

    model: a path, opened with `load`, or an open model. keywords: fields of
    `runtime.bench.options.BenchOptions` and, for a path, of `runtime.options.LoadOptions`; they win
    over `options` and `load`.

    - prompts ([512]), generations ([128]): tokens of each test. prompt_generations,
      generations_after: pairs (P, G), timed together, or only the G tokens.
    - depths ([0]): tokens in the context before each test.
    - repetitions (5), warmup, n_batch (2048): see `runtime.bench.bench.run_test`.
    - device, precision, threads, ...: see `load_model`.

    Results have `.test.label`, `.samples_ts` and `.avg_ts` in tokens/s, `.bytes_per_second` or
    `.flop_per_second`. cache: of keys and values, else the model's. progress: is called with a line
    of text now and then; on_result: with every result as it is measured.
    """
    from ..runtime.bench.bench import run_test
    from ..runtime.bench.options import BenchOptions

    options, load = split_options(benchmark_model, model, keywords, BenchOptions, options, load)
    tests: list[Test] = options.tests()
    results = []
    with opened_model(model, load) as loaded:
        for test in tests:
            results.append(
                run_test(
                    loaded,
                    test,
                    cache,
                    n_batch=options.n_batch,
                    repetitions=options.repetitions,
                    warmup=options.warmup,
                    progress=progress,
                )
            )
            if on_result is not None:
                on_result(results[-1])
    return results


def sweep_model(
    model: PathLike | Model,
    n_ctx: int = 4096,
    *,
    options: SweepOptions | None = None,
    load: LoadOptions | None = None,
    **keywords: Any,
) -> Iterator[SweepRow]:
    """Return the speed of prompts and of generation as the context fills, up to `n_ctx` tokens (0:
    as many as the model was trained for).

    keywords: fields of `runtime.bench.options.SweepOptions` (tg, stride, first_repetitions,
    warmup) and, for a path, of `runtime.options.LoadOptions`. See `runtime.bench.sweep`.
    """
    from ..runtime.bench.options import SweepOptions
    from ..runtime.bench.sweep import sweep

    chosen, load = split_options(sweep_model, model, keywords, SweepOptions, options, load)

    def rows() -> Iterator[SweepRow]:
        with opened_model(model, load) as loaded:
            length = n_ctx or loaded.hyperparameters.integer("context_length")
            yield from sweep(loaded, length, chosen)

    return rows()


def profile_model(
    model: PathLike | Model,
    n_prompt: int = 512,
    n_gen: int = 16,
    *,
    n_depth: int = 0,
    cache: CacheSettings | None = None,
    load: LoadOptions | None = None,
    **keywords: Any,
) -> dict[str, list[Pass]]:
    """Profile prompts of `n_prompt` tokens, and `n_gen` generated tokens after `n_depth` others.

    keywords: fields of `runtime.options.LoadOptions`, for a path. Returns the passes of each kind
    by label, with their kernels (on the CPU: modules) and layers; see `runtime.profile`.
    """
    from ..formats.options import Options
    from ..runtime.profile.profile import profile_model as profile
    from ..runtime.state.cache import CacheSettings

    _, load = split_options(profile_model, model, keywords, Options, None, load)
    with opened_model(model, load) as loaded:
        settings = cache or loaded.cache or CacheSettings()
        return profile(loaded, n_prompt, n_gen, n_depth=n_depth, settings=settings)
