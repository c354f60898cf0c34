"""Run models: perplexity, tasks and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..formats.options import checks_keywords
from .models import check_load_keywords, open_model, opened_model, split_options, text_of
from .source import PathLike

if TYPE_CHECKING:
    import torch

    from ..formats.source import Source
    from ..runtime.evaluate.chunks import ProgressCallback
    from ..runtime.evaluate.divergence import Divergence, Statistics
    from ..runtime.evaluate.perplexity import Perplexity
    from ..runtime.evaluate.tasks import TaskItem, TaskScore
    from ..runtime.generate import Generation
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.text_options import ChunkOptions, GenerateOptions, PerplexityOptions
    from ..runtime.tokenizer import Tokenizer


def measure_perplexity(
    model: PathLike | Model,
    text: PathLike | None,
    *,
    options: PerplexityOptions | None = None,
    load: LoadOptions | None = None,
    progress: ProgressCallback | None = None,
    on_chunk: Callable[[int, Statistics], None] | None = None,
    against: PathLike | Model | None = None,
    **keywords: Any,
) -> Perplexity | Divergence:
    """Measure the perplexity of `model` on `text` over chunks of n_ctx tokens.

    model: a path, opened with `load`, or an open model. text: a file, or the text itself (a string
    with a line break in it). keywords: fields of `runtime.text_options.PerplexityOptions` and, for
    a path, of `runtime.options.LoadOptions`; they win over `options` and `load`.

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
    if text is None:
        raise UsageError("a text is needed")
    content, path = text_of(text)
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
            raise UsageError("a base file has no windows that overlap: it cannot have ppl_stride")
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


def generate(
    model: PathLike | Model,
    prompt: str | Sequence[int],
    n: int | None = None,
    *,
    options: GenerateOptions | None = None,
    load: LoadOptions | None = None,
    echo: bool = False,
    record: Generation | None = None,
    **keywords: Any,
) -> Iterator[str]:
    """Return the text that follows `prompt` (or its tokens), in pieces as it comes.

    model: a path, opened with `load`, or an open model. keywords: fields of
    `runtime.text_options.GenerateOptions` and, for a path, of `runtime.options.LoadOptions`; they
    win over `options` and `load`.

    - n (128, if they fit): the most tokens to generate; below 0: until the context is full.
      context: the most tokens in all, prompt included; 0: as many as needed.
    - temperature (0.8), top_k (40), top_p (0.95), min_p (0.05), seed (0), and the other samplers of
      `runtime.sampling.options.SamplerOptions`. Temperature 0 takes the most probable token each
      time; the same seed gives the same text.
    - stop: texts that end the text before them. grammar, json_schema: what the text follows.
    - ignore_eos: continue after tokens that end a text. special: also yield control tokens.
    - device, precision, threads, ...: see `load_model`.

    echo: yield the prompt first. record: gets tokens and times. The pieces together are the whole
    text; `runtime.generate.generate_tokens` yields tokens instead.
    """
    from ..runtime.text_options import GenerateOptions

    keywords = keywords if n is None else keywords | {"n": n}
    options, load = split_options(generate, model, keywords, GenerateOptions, options, load)
    return _generate(model, prompt, options, load, echo, record)


def _generate(
    model: PathLike | Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    load: LoadOptions,
    echo: bool,
    record: Generation | None,
) -> Iterator[str]:
    from ..formats.arguments import whole_numbers
    from ..runtime.generate import (
        end_tokens,
        generate_tokens,
        new_constraint,
        plan_length,
        prompt_tokens,
    )
    from ..runtime.network.sampling import GREEDY
    from ..runtime.sampling.chain import SamplerChain
    from ..runtime.tokenizer.stream import StopText, TextStream

    settings, grammar = options.settings(), options.grammar_source()
    sampling = None if grammar is not None else settings.plain()
    with opened_model(model, load) as loaded:
        tokens = (
            prompt_tokens(loaded.tokenizer, prompt)
            if isinstance(prompt, str)
            else whole_numbers("prompt", prompt)
        )
        stream = TextStream(loaded.tokenizer, options.special, from_start=echo)
        end = frozenset() if options.ignore_eos else end_tokens(loaded)
        if record is not None:
            record.prompt_tokens = len(tokens)
        chain = None
        if sampling is None:
            begin = new_constraint(loaded, grammar, end)
            context, _ = plan_length(tokens, options.n, options.context, loaded.hyperparameters)
            chain = SamplerChain(
                settings, loaded.tokenizer.token_bytes, context, None if begin is None else begin()
            )
        following = generate_tokens(
            loaded,
            tokens,
            options.n,
            sampling or GREEDY,
            context=options.context,
            end=end,
            record=record,
            chain=chain,
            cache=options.cache(),
        )
        if echo:  # also where the first token completes a character of the prompt
            for token in tokens:
                if piece := stream.feed(token):
                    yield piece
        stops = StopText(options.stop)
        for token in following:
            if piece := stops.feed(stream.feed(token)):
                yield piece
            if stops.found is not None:
                return
        if piece := stops.feed(stream.end()) + stops.end():
            yield piece


@checks_keywords
def plan_generation(
    source: Source, prompt: str, n: int | None = None, context: int = 0
) -> tuple[int, int]:
    """Return the context and the number of tokens that `generate` would use with these arguments,
    for a model that is not loaded yet.

    Raise EvaluationError for a prompt, or `n` tokens after it, that do not fit `context`.
    """
    from ..runtime.architectures import declaration
    from ..runtime.generate import plan_length, prompt_tokens
    from ..runtime.tokenizer import Tokenizer
    from ..runtime.weights.hyperparameters import Hyperparameters

    file = str(source.path)
    hyperparameters = Hyperparameters(source.metadata, file)
    declaration(hyperparameters.architecture, file)  # before the tokenizer, which it may lack
    tokens = prompt_tokens(Tokenizer.from_metadata(source.metadata, file=file), prompt)
    return plan_length(tokens, n, context, hyperparameters)


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
    from .source import open_source

    with open_source(path) as source:
        return Tokenizer.from_metadata(source.metadata, file=str(source.path))
