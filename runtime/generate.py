"""Text from a model, token by token."""

from __future__ import annotations

import codecs
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import EvaluationError, UsageError
from ..formats.gguf.values import get
from .arguments import whole_number
from .cache import CacheSettings
from .hyperparameters import Hyperparameters
from .model import Model
from .sampling import GREEDY, Sampling, sample
from .tokenizer import Tokenizer, TokenType

# Control tokens that end a turn, under the names that vocabularies give them.
_TURN_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|return|>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
    "<|end_of_text|>",
    "<|user|>",
    "<|END_OF_TURN_TOKEN|>",
    "<EOT>",
    "_<EOT>",
}


@dataclass
class Generation:
    """What happened while text was generated. Seconds of the prompt end when its last logits are
    there.
    """

    prompt_tokens: int
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)  # with the end token, if it came
    ended: bool = False  # by a token that ends the text

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_tokens / max(self.prompt_seconds, 1e-9)

    @property
    def per_second(self) -> float:
        """Tokens per second after the first one, which comes from the prompt's logits."""
        return (
            (len(self.tokens) - 1) / self.seconds
            if len(self.tokens) > 1 and self.seconds > 0
            else 0.0
        )


class TextStream:
    """Tokens to text, in pieces that end at whole characters. Control tokens are left out unless
    `special`.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self.tokenizer, self.special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is complete with this token; bytes that cannot become UTF-8 are U+FFFD."""
        if not self.special and self.tokenizer.types[token] == TokenType.CONTROL:
            return ""
        return self._decoder.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """What is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokens of a prompt: BOS where the model wants it, texts of control tokens become these
    tokens, no EOS.

    UsageError for an empty prompt to a model that has no BOS either.
    """
    special = tokenizer.special
    tokens = ([special.bos] if special.add_bos else []) + tokenizer.encode(
        prompt, add_special=False, parse_special=True
    )
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
    found |= {
        i
        for i, text in enumerate(tokenizer.tokens)
        if text in _TURN_ENDS and tokenizer.types[i] == TokenType.CONTROL
    }
    return frozenset(found - {None})


def context_for(prompt: Sequence[int], n: int, context: int, p: Hyperparameters) -> int:
    """Most tokens of a sequence that begins with `prompt`: `context` if it is positive, else as
    many as needed for `n` more, or what the model was made for if n is negative. EvaluationError
    for a prompt that does not fit.
    """
    if context <= 0:
        context = len(prompt) + n if n >= 0 else p.integer("context_length", len(prompt) + 4096)
    if len(prompt) > context:
        raise EvaluationError(
            f"the prompt has {len(prompt)} tokens, more than the context of {context}", file=p.file
        )
    return context


def generate_tokens(
    model: Model,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling = GREEDY,
    *,
    settings: CacheSettings | None = None,
    context: int = 0,
    end: frozenset[int] = frozenset(),
    record: Generation | None = None,
) -> Iterator[int]:
    """Yields up to `n` tokens that follow `prompt`, the one in `end` that stops them included.

    n < 0: as many as fit. `context`: most tokens of the sequence, prompt included, see
    `context_for`. `settings`: of the cache, else the model's. `record` is filled in along the way.
    EvaluationError for a prompt that does not fit or logits that are not finite, UsageError for a
    cache that does not suit the model.
    """
    n, context = whole_number("n", n), whole_number("context", context)
    record = record if record is not None else Generation(len(prompt))
    context = context_for(prompt, n, context, model.hyperparameters)
    n = context - len(prompt) if n < 0 else min(n, context - len(prompt))
    state = model.new_state(context, settings)
    started = time.perf_counter()
    logits = model.extend(prompt, state)
    token = sample(logits, sampling, state.n_past) if n > 0 else None
    record.prompt_seconds, started = time.perf_counter() - started, time.perf_counter()
    if token is None:
        return
    for token in itertools.chain([token], model.follow(token, state, n - 1, sampling)):
        record.seconds = time.perf_counter() - started
        record.tokens.append(token)
        yield token
        if token in end:
            record.ended = True
            return
