"""Generate text with a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..formats.options import checks_keywords
from .models import opened_model, split_options
from .source import PathLike

if TYPE_CHECKING:
    from ..formats.source import Source
    from ..runtime.generate import Generation
    from ..runtime.model import Model
    from ..runtime.options import LoadOptions
    from ..runtime.text_options import GenerateOptions


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
