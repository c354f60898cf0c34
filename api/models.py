"""Open models, tokenizers and texts that calls name by path."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..formats.options import Options, checks_keywords, from_keywords, unknown_option
from .source import PathLike, open_source

if TYPE_CHECKING:
    import torch

    from ..formats.source import Source
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Chosen = TypeVar("Chosen", bound=Options)


def load_model(
    path: PathLike,
    device: str | torch.device | None = None,
    *,
    options: LoadOptions | None = None,
    source: Source | None = None,
    **keywords: Any,
) -> Model:
    """Open a model for evaluation: a GGUF file (plain, split, quantized) or a checkpoint folder.

    `.forward(token_ids)` returns logits float32[n, vocab]; `.tokenizer` has `encode(text)` and
    `decode(ids)`. source: what `open_source` returned for `path`; it is closed with the model.
    keywords: fields of `runtime.options.LoadOptions`, which win over `options`:

    - device: "cpu" (default), "cuda", "cuda:N" or "auto" (the first GPU, or the CPU).
    - precision: "f32", the reference path (default on the CPU), or "bf16" (default on a GPU)
      or "f16", or "int8": products in 8 bits, on the CPU those with quantized weights, on a GPU
      dense ones of prompts.
    - threads: CPU threads of this process, 0: as they are. cache_size: MiB of decoded weights.
    - gpu_layers, override_tensor, n_cpu_moe, cpu_moe, fit: what is on the GPU.
    - split_mode="graph" or "layer", tensor_split, main_gpu, max_gpu, reduce_type, timeout:
      split the model over the processes that torchrun has started; all of them make the same calls.
    - ubatch: the most tokens that go through the layers at once.
    - cache_type_k, cache_type_v, k_cache_hadamard, v_cache_hadamard, flash_attn,
      attention_max_batch, expert_reduction, merge_gate_up: as the flags of `iqforge generate`.

    Also those of `runtime.model.Model`: placement, switches, cache, cache_bytes, context, verbose.
    """
    keywords = keywords if device is None else keywords | {"device": device}
    check_load_keywords(load_model, keywords)
    return open_model(path, options, source=source, **keywords)


@checks_keywords
def load_tokenizer(path: PathLike) -> Tokenizer:
    """Return the tokenizer of a GGUF file or a checkpoint folder, from its metadata alone.

    `.encode(text, add_special=True, parse_special=False)` returns ids, `.decode(ids)` the text.
    Raise TokenizerError for a vocabulary that cannot be tokenized with.
    """
    from ..runtime.tokenizer import Tokenizer

    with open_source(path) as source:
        return Tokenizer.from_metadata(source.metadata, file=str(source.path))


def text_of(text: PathLike) -> tuple[str, str]:
    """Return (content, path) of a text file, or (text, "") of a text that is given itself."""
    from ..formats.arguments import path
    from ..runtime.evaluate.chunks import read_text

    path("text", text)
    if isinstance(text, str) and "\n" in text:
        return text, ""
    return read_text(text), os.fspath(text)


def texts_of(given: PathLike | Sequence[PathLike]) -> list[list[tuple[str, str]]]:
    """Return what `text_of` returns for each text; several for "default", the calibration text that
    comes with the package.
    """
    from ..imatrix.default_texts import DEFAULT, default_texts

    texts = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    return [default_texts() if text == DEFAULT else [text_of(text)] for text in texts]


_MODEL_KEYWORDS = ("cache_bytes", "placement", "switches", "cache", "context", "verbose")


def split_options(
    function: Callable[..., Any],
    model: PathLike | Model,
    keywords: Mapping[str, Any],
    cls: type[Chosen],
    options: Chosen | None,
    load: LoadOptions | None,
) -> tuple[Chosen, LoadOptions]:
    """Return the options of a call of `function` and those that its model is loaded with. Those of
    loading that are keywords and change nothing are logged, once for all models of the call.

    Raise UsageError for an unknown keyword, and for a keyword of loading if the model is already
    loaded.
    """
    from ..runtime.options import LoadOptions

    chosen, loading = from_keywords(function, keywords, (cls, options), (LoadOptions, load))
    if not isinstance(model, (str, os.PathLike)):
        about_loading = [name for name in keywords if name not in cls.field_names()]
        if load is not None or about_loading:
            given = f"option '{about_loading[0]}'" if about_loading else "load options"
            raise UsageError(
                f"{function.__name__} takes {given} only with a path; this model is already loaded"
            )
    else:
        warn_of_unused(loading, keywords)
    return chosen, loading


def opened_model(
    model: PathLike | Model, load: LoadOptions | None = None, *, collects: bool = False
) -> AbstractContextManager[Model]:
    """Return `model` as a context manager: a path is opened with `load` and closed, a caller's
    model is left open. collects: the default precision is that of statistics of inputs.
    """
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..formats.arguments import instance
    from ..runtime.model import Model

    if isinstance(model, (str, os.PathLike)):
        return _opened(model, collecting_options(load) if collects else load)
    return nullcontext(instance("model", model, Model, "a path or a Model"))


def collecting_options(load: LoadOptions | None) -> LoadOptions:
    """Return `load` with the precision in which statistics of inputs are collected, if it has
    none.
    """
    from ..runtime.options import LoadOptions
    from ..runtime.precision import collecting_precision
    from ..runtime.start_ranks import device_here

    load = load or LoadOptions()
    if load.precision is not None:
        return load
    return replace(load, precision=collecting_precision(device_here(load)))


@contextmanager
def _opened(path: PathLike, load: LoadOptions | None) -> Iterator[Model]:
    import torch

    threads = torch.get_num_threads()
    try:
        with open_model(path, load) as model:
            yield model
    finally:
        torch.set_num_threads(threads)


def check_load_keywords(function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise UsageError for a keyword of `function` that `open_model` does not take."""
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..runtime.options import LoadOptions

    known = [*LoadOptions.field_names(), *_MODEL_KEYWORDS]
    for name in keywords:
        if name not in known:
            raise unknown_option(function, name, known)


def open_model(
    path: PathLike,
    options: LoadOptions | None = None,
    *,
    source: Source | None = None,
    **keywords: Any,
) -> Model:
    """Return the model at `path`, or of a source that is open already. keywords: of `LoadOptions`,
    or those of `runtime.model.Model` that no flag has.
    """
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..formats import arguments
    from ..runtime.arguments import check_options
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.parallel.share import Share
    from ..runtime.parallel.stages import Stage
    from ..runtime.start_ranks import device_here, joined_part, joined_peers

    own = {name: keywords.pop(name) for name in _MODEL_KEYWORDS if name in keywords}
    load: LoadOptions = from_keywords("a model", keywords, (LoadOptions, options))[0]
    check_options(**own)
    device = device_here(load)  # before a large file is read
    settings = load.settings(device) | own
    warn_of_unused(load, keywords)
    load.set_threads()
    opened = source or open_source(arguments.path("path", path))
    try:
        opened = _with_adapters(opened, load, device)
        part = joined_part(load, device, opened, settings["switches"])
        peers = joined_peers(load, device)
        share = part if isinstance(part, Share) else None
        stage = part if isinstance(part, Stage) else None
        return Model(opened, device, **settings, share=share, stage=stage, peers=peers)
    except BaseException:
        opened.close()
        raise


def warn_of_unused(load: LoadOptions, keywords: Collection[str]) -> None:
    """Log which of the keywords of a call change nothing, once for all ranks. Commands pass an
    object and no keywords: they say it of their flags.
    """
    given = set(load.field_names()).intersection(keywords)
    if not given:
        return
    from ..runtime import let_threads_sleep

    let_threads_sleep()  # before torch is imported
    from ..runtime.start_ranks import device_here, is_first

    if not is_first():
        return
    for flags, why in load.notes(device_here(load)):
        names = [name for name in map(load.field_of, flags.split(", ")) if name in given]
        if names:
            log.warning("%s: no effect here, %s", ", ".join(names), why)


def _with_adapters(source: Source, load: LoadOptions, device: torch.device) -> Source:
    """Return the source with the adapters of `load` merged in: in float32 on the CPU, and on a GPU
    in the type that it computes with.
    """
    adapters = load.adapters()
    if not adapters:
        return source
    from ..formats.tools.lora_source import LoraSource
    from ..formats.types import TYPES
    from ..runtime.precision import usable_precision

    int8 = "F32" if device.type == "cpu" else "BF16"
    names = {"f32": "F32", "int8": int8, "bf16": "BF16", "f16": "F16"}
    return LoraSource(source, adapters, TYPES[names[usable_precision(load.precision, device)]])
