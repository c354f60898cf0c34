"""Text from a model, token by token."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import EvaluationError, UsageError, printable
from ..formats.arguments import whole_number
from ..formats.values import get
from .model import Model
from .network.sampling import GREEDY, Sampling, sample
from .parallel.alike import check_alike, digest_of
from .prompt_cache import PromptCache
from .sampling.chain import Constraint, SamplerChain
from .state.cache import CacheSettings
from .state.sequence import State
from .tokenizer import Tokenizer, TokenType
from .weights.hyperparameters import Hyperparameters

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 128  # to generate, if the context has space for them

# Tokens that end a turn or a text, under the names that vocabularies give them.
_TURN_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<end_of_utterance>",
    "[|endofturn|]",
    "</s>",
    "<eos>",
    "<seed:eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|end_of_text|>",
    "<|user|>",
    "<|observation|>",
    "<|END_OF_TURN_TOKEN|>",
    "<EOT>",
    "_<EOT>",
    "< EOT >",
    "[EOT]",
    "[EOS]",
    "<|EOT|>",
}
_ENDS_WITH_CHANNELS = {"<|return|>", "<|call|>"}  # with these, <|end|> is between two channels


@dataclass
class Generation:
    """What happened while text was generated. Seconds of the prompt end when its last logits are
    there; those of its file, which is read and written, are among them.
    """

    prompt_tokens: int
    reused: int = 0  # tokens of the prompt that came from a file
    prompt_seconds: float = 0.0
    file_seconds: float = 0.0
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)  # with the end token, if it came
    ended: bool = False  # by a token that ends the text

    @property
    def prompt_per_second(self) -> float:
        """Tokens of the prompt per second, of those that were evaluated."""
        evaluated = self.prompt_tokens - self.reused
        return evaluated / max(self.prompt_seconds - self.file_seconds, 1e-9)

    @property
    def per_second(self) -> float:
        """Tokens per second after the first one, which comes from the prompt's logits."""
        return (
            (len(self.tokens) - 1) / self.seconds
            if len(self.tokens) > 1 and self.seconds > 0
            else 0.0
        )


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokens of a prompt: BOS where the model wants it, texts of control tokens become these
    tokens, no EOS.

    UsageError for an empty prompt to a model that has no BOS either.
    """
    special = tokenizer.special
    tokens = tokenizer.encode(prompt, add_special=False, parse_special=True)
    if special.add_bos and special.bos is not None:
        tokens = [special.bos, *tokens]
    if not tokens:
        raise UsageError("the prompt is empty, and this model has no token that begins a text")
    return tokens


def end_tokens(model: Model) -> frozenset[int]:
    """Ids that end a text: EOS, and those that end a turn by metadata or by name."""
    found, metadata, tokenizer = {model.special_tokens.eos}, model.source.metadata, model.tokenizer
    for name in ("eot", "eom"):
        found.add(
            get(metadata, f"tokenizer.ggml.{name}_token_id", int, None, file=str(model.source.path))
        )
    added = (TokenType.CONTROL, TokenType.USER_DEFINED)
    named = {
        text: i
        for i, text in enumerate(tokenizer.tokens)
        if text in _TURN_ENDS and tokenizer.types[i] in added
    }
    if named.keys() >= _ENDS_WITH_CHANNELS:
        named.pop("<|end|>", None)
    found |= set(named.values())
    return frozenset(token for token in found if token is not None)


def new_constraint(
    model: Model, grammar: tuple[str, str] | None, end: frozenset[int]
) -> Callable[[], Constraint] | None:
    """Return what begins a text that follows a grammar (kind, text) and ends with a token of `end`;
    None without a grammar.
    """
    if grammar is None:
        return None
    from .grammar.constraint import grammar_maker  # its package is only needed here

    return grammar_maker(grammar, model.tokenizer, end)


def plan_length(
    prompt: Sequence[int], n: int | None, context: int, p: Hyperparameters
) -> tuple[int, int]:
    """Return the context to allocate and the number of tokens to generate after `prompt`.

    context: the most tokens of the sequence, prompt included; 0 for as many as needed. n: how many
    tokens to generate; None for DEFAULT_TOKENS or as many as fit; negative for as many as fit, in
    the context that the model was trained for if `context` is 0. EvaluationError if the prompt or
    `n` tokens after it do not fit.
    """
    if context <= 0:
        n = DEFAULT_TOKENS if n is None else n
        context = len(prompt) + n if n >= 0 else p.integer("context_length", len(prompt) + 4096)
    free = context - len(prompt)
    if free < 0:
        raise EvaluationError(
            f"the prompt has {len(prompt)} tokens, more than the context of {context}", file=p.file
        )
    if n is None:
        n = min(DEFAULT_TOKENS, free)
    elif n < 0:
        n = free
    if n > free:
        raise EvaluationError(
            f"the prompt of {len(prompt)} tokens and {n} more do not fit the context of {context}:"
            f" at most {free} can be generated",
            file=p.file,
        )
    return context, n


def generate_tokens(
    model: Model,
    prompt: Sequence[int],
    n: int | None = None,
    sampling: Sampling = GREEDY,
    *,
    settings: CacheSettings | None = None,
    context: int = 0,
    end: frozenset[int] = frozenset(),
    record: Generation | None = None,
    chain: SamplerChain | None = None,
    cache: PromptCache | None = None,
) -> Iterator[int]:
    """Return up to `n` tokens that follow `prompt`, including the one in `end` that stops them.

    n, context: see `plan_length`. settings: those of the cache, by default the model's. `record` is
    filled in along the way. chain: samplers that draw on the host instead of `sampling`. cache: a
    file with the state of a prompt. A text that may become longer than the context that the model
    was trained for is logged as a warning. EvaluationError for tokens that do not fit or logits
    that are not finite, UsageError for a cache that does not suit the model. Arguments, memory and
    the cache are checked, code is compiled, and the warning is logged, before the first token is
    asked for.
    """
    n, context = None if n is None else whole_number("n", n), whole_number("context", context)
    record = record if record is not None else Generation(len(prompt))
    if model.group is not None:
        asked = {"prompt": digest_of(repr(list(map(int, prompt))).encode())}
        check_alike(model.group, asked | {"-n": str(n), "-c": str(context)})
    context, n = plan_length(prompt, n, context, model.hyperparameters)
    trained = model.hyperparameters.integer("context_length", None)
    if trained is not None and len(prompt) + n > trained:
        log.warning(
            "%s was trained for a context of %d tokens, and %d are asked for: expect a worse text"
            " after the first %d",
            printable(model.source.path, 400),
            trained,
            len(prompt) + n,
            trained,
        )
    if cache is not None:
        cache.check(model)
    if chain is not None:
        chain.check(model.n_vocab)
    state = model.new_state(context, settings)
    if n > 1:
        model.prepare(state, len(prompt))
    if cache is not None:
        started = time.perf_counter()
        record.reused = cache.begin(model, prompt, state)
        record.prompt_seconds = record.file_seconds = time.perf_counter() - started
        return _with_cache(cache, model, prompt, n, sampling, state, end, record, chain)
    return continued(model, prompt, n, sampling, state, end, record, chain)


def _with_cache(
    cache: PromptCache,
    model: Model,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling,
    state: State,
    end: frozenset[int],
    record: Generation,
    chain: SamplerChain | None,
) -> Iterator[int]:
    """Yield what `continued` does after what `state` has of the prompt, and write the file."""
    before, started = record.prompt_seconds, time.perf_counter()
    if chain is not None:
        chain.accept(prompt[: len(prompt) - 1])
    if rest := prompt[state.n_past : -1]:
        model.extend(rest, state)
    if not cache.read_only and not cache.writes_all and record.reused < len(prompt) - 1:
        writing = time.perf_counter()
        cache.write(model, prompt, state)
        record.file_seconds += time.perf_counter() - writing
    before += time.perf_counter() - started
    yield from continued(model, prompt[-1:], n, sampling, state, end, record, chain)
    record.prompt_seconds += before
    if cache.writes_all and not cache.read_only:
        cache.write(model, [*prompt, *record.tokens], state)


def continued(
    model: Model,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling,
    state: State,
    end: frozenset[int],
    record: Generation,
    chain: SamplerChain | None = None,
) -> Iterator[int]:
    """Append `prompt` to the sequence of `state` and yield up to `n` tokens that follow, as
    `generate_tokens` does. A `chain` must know the tokens before `prompt`.

    `state.n_past` counts what was appended; the last token that was yielded is not.
    """
    started = time.perf_counter()
    logits = model.extend(prompt, state)
    first = None
    if chain is not None:
        chain.accept(prompt)
    if n > 0:
        at = state.n_past
        first = sample(logits, sampling, at) if chain is None else chain.sample(logits, at)
    record.prompt_seconds, started = time.perf_counter() - started, time.perf_counter()
    if first is None:
        return
    if chain is None:
        following = model.follow(first, state, n - 1, sampling)
    else:
        following = _drawn_on_host(model, first, state, n - 1, chain)
    for token in itertools.chain([first], following):
        record.seconds = time.perf_counter() - started
        record.tokens.append(token)
        yield token
        if token in end:
            record.ended = True
            return


def _drawn_on_host(
    model: Model, token: int, state: State, n: int, chain: SamplerChain
) -> Iterator[int]:
    """Append `token`, then every token that the chain draws, and yield these `n` tokens."""
    for _ in range(n):
        token = chain.sample(model.extend([token], state), state.n_past)
        yield token
