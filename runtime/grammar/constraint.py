"""Grammars and JSON schemas, followed by the package llguidance."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection

import llguidance
import numpy as np

from ...errors import EvaluationError, UsageError, printable
from ..tokenizer.tokenizer import Tokenizer
from ..tokenizer.vocabulary import TokenType
from .gbnf import gbnf_to_lark

log = logging.getLogger(__name__)

# As in llama.cpp's grammars for JSON: a model cannot fill the context with spaces.
_WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Bounds of a single mask: a whole vocabulary, character by character.
_LIMITS = {
    "max_items_in_row": 20_000,
    "initial_lexer_fuel": 50_000_000,
    "step_lexer_fuel": 50_000_000,
    "step_max_items": 50_000_000,
    "verbose_errors": False,
}


class Grammar:
    """A grammar for one vocabulary. `new` begins a text that follows it.

    kind: "gbnf" or "json_schema". end: the tokens that can end a text. UsageError for a grammar
    that is malformed, or that the package does not support. Alternatives of `oneOf` that may hold
    together are those of `anyOf`, as in llama.cpp, with a warning.
    """

    def __init__(self, kind: str, text: str, tokenizer: Tokenizer, end: Collection[int]):
        if not end:
            raise UsageError("a text that follows a grammar needs a token that ends it")
        self.end = frozenset(end)
        self._name = "grammar" if kind == "gbnf" else "JSON schema"
        vocabulary = _Vocabulary(tokenizer, min(end))
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(vocabulary.tokens),
            eos_token=sorted(end),
            slices=[],
        )
        if kind == "gbnf":
            self._text = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text))
        else:
            schema = _read_schema(text)
            self._text = _schema_grammar(schema)
            if "coerce_one_of" in self._matcher().get_error():  # it names an option of the package
                log.warning("oneOf in the JSON schema is followed as anyOf, as in llama.cpp")
                self._text = _schema_grammar(schema, coerce_one_of=True)
        self.new()

    def new(self) -> GrammarConstraint:
        """Return what the next token of an empty text may be. Raise UsageError for a grammar that
        is not supported.
        """
        matcher = self._matcher()
        if matcher.is_error():
            problem = _in_one_line(matcher.get_error())
            raise UsageError(f"the {self._name} is not supported: {problem}")
        return GrammarConstraint(matcher, self.end, self._tokenizer.vocab_size)

    def _matcher(self) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(**_LIMITS)
        return llguidance.LLMatcher(self._tokenizer, self._text, log_level=0, limits=limits)


class GrammarConstraint:
    """A text that follows a grammar, as far as it is known: a `sampling.chain.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, end: frozenset[int], n_tokens: int):
        self._matcher, self._end, self._n = matcher, end, n_tokens

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        if token in self._end:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1

    def mask(self) -> np.ndarray:
        """Return bool[vocab]: the tokens that may come next. Where the grammar forces a text, only
        the token that the tokenizer begins it with.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[: self._n].astype(bool)
        for token in self._end:
            allowed[token] = self._matcher.is_accepting()
        return allowed

    def accept(self, token: int) -> None:
        """`token` comes next."""
        if token not in self._end:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = _first_line(self._matcher.get_error())
            if problem.startswith("NoExtension"):
                problem = "no token can continue the text"
            raise EvaluationError(f"the grammar failed: {problem}")


def grammar_maker(
    source: tuple[str, str] | None, tokenizer: Tokenizer, end: Collection[int]
) -> Callable[[], GrammarConstraint] | None:
    """Return what begins a text that follows a grammar (kind, text); None for no grammar."""
    return None if source is None else Grammar(*source, tokenizer, end).new


class _Vocabulary:
    """The vocabulary as llguidance reads it: the bytes of every token, and which are special."""

    def __init__(self, tokenizer: Tokenizer, eos: int):
        normal = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids, self.tokens = [], []
        for token, kind in enumerate(tokenizer.types):
            text = tokenizer.token_bytes(token) if kind in normal else b""
            if not text:
                self.special_token_ids.append(token)
                text = f"<{token}>".encode()
            self.tokens.append(text)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False)


def _read_schema(text: str) -> dict:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is not JSON: line {error.lineno}: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"the JSON schema cannot be read: {_first_line(str(error))}") from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    if not isinstance(schema, (dict, bool)):
        raise UsageError("the JSON schema is not an object")
    if schema is False:
        raise UsageError("the JSON schema is false, which allows nothing")
    return schema if isinstance(schema, dict) else {}


def _schema_grammar(schema: dict, coerce_one_of: bool = False) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": True,
                "whitespace_pattern": _WHITESPACE,
                "coerce_one_of": coerce_one_of,
            },
        )
    except ValueError as error:  # integers beyond 64 bits, halves of surrogate pairs
        problem = _first_line(str(error))
        raise UsageError(f"a value in the JSON schema is not supported: {problem}") from None


def _no_constant(name: str) -> None:
    raise UsageError(f"the JSON schema is not JSON: {name} is not a value")


def _in_one_line(problem: str) -> str:
    """Return a message without its drawings: lines of ^ below what they point to."""
    lines = [line.strip() for line in problem.splitlines()]
    shown = "\n".join(line for line in lines if line.strip("^"))
    return printable(shown.replace("\nerror: ", ": ").replace("\n", " "), 400)


def _first_line(text: str) -> str:
    return printable(text.strip().split("\n")[0], 400)
