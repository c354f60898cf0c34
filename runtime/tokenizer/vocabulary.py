"""What a file says about its vocabulary: tokens with types, scores and merges, special tokens."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import TokenizerError, printable
from ...formats.pretokenizers import PRETOKENIZERS
from ...formats.values import Value, get

PREFIX = "tokenizer.ggml."
_LARGEST_SCORE = 1e38  # scores are float32
_SURROGATE = re.compile("[\ud800-\udfff]")  # what stands for bytes that are not UTF-8
# Kinds with ids of special tokens that runtimes assume where a file has none, as old files do.
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
    "bert": {"bos": 101, "seperator": 102, "unknown": 100},
}


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`.

    They decide what text inside the input can become: control tokens only where `parse_special`
    asks for it, user-defined tokens always, unused ones never.
    """

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that begin and end a text, None where there are none, and whether the model
    wants them added. `unk` stands for what has no token.
    """

    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    unk: int | None = None

    @classmethod
    def read(cls, metadata: dict[str, Value], file: str | None = None) -> SpecialTokens:
        """Read them for any vocabulary, also one that cannot be tokenized with. Raise
        TokenizerError for ids outside of it.
        """
        model = get(metadata, f"{PREFIX}model", str, file=file)
        tokens = get(metadata, f"{PREFIX}tokens", list, file=file)
        bos, eos, unk, sep = (
            _token_id(metadata, name, len(tokens), model, file)
            for name in ("bos", "eos", "unknown", "seperator")
        )
        if model == "bert" and sep is not None:
            eos = sep  # a text ends with the separator
        special = replace(_defaults(metadata, model, bos, eos, file), unk=unk)
        for added, found, name in (
            (special.add_bos, special.bos, "bos"),
            (special.add_eos, special.eos, "eos"),
        ):
            if added and found is None:
                raise TokenizerError(
                    f"{PREFIX}add_{name}_token is set, but there is no {name}_token_id", file=file
                )
        return special


def _defaults(
    metadata: dict[str, Value], model: str, bos: int | None, eos: int | None, file: str | None
) -> SpecialTokens:
    """Return BOS and EOS, added as the file says, else as this kind of vocabulary does."""
    name = get(metadata, f"{PREFIX}pre", str, "", file=file)
    pre = PRETOKENIZERS.get(name)
    adds_bos = model in ("llama", "bert") or (pre is not None and pre.add_bos)
    add_bos = get(metadata, f"{PREFIX}add_bos_token", bool, adds_bos and bos is not None, file=file)
    adds_eos = model in ("bert", "t5") and eos is not None
    add_eos = get(metadata, f"{PREFIX}add_eos_token", bool, adds_eos, file=file)
    # Files of Gemma 4 say otherwise by mistake; the model is useless without BOS.
    forced = bos is not None and (model == "gemma4" or name == "gemma4")
    return SpecialTokens(bos, eos, add_bos or forced, add_eos)


def _token_id(
    metadata: dict[str, Value], name: str, n_tokens: int, model: str, file: str | None
) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    found = get(metadata, key, int, None, file=file)
    if found is not None and not 0 <= found < n_tokens:
        raise TokenizerError(f"{key} is {found}, but there are {n_tokens} tokens", file=file)
    if found is not None:
        return found
    default = _DEFAULT_IDS.get(model, {}).get(name)
    return default if default is not None and default < n_tokens else None


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a file, checked: lists have one entry per token, scores are finite."""

    model: str  # tokenizer.ggml.model
    pre: str  # tokenizer.ggml.pre
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    special: SpecialTokens
    metadata: dict[str, Value]
    file: str | None = None

    @classmethod
    def read(cls, metadata: dict[str, Value], file: str | None = None) -> Vocabulary:
        """Raise TokenizerError for lists that do not fit together."""
        model = get(metadata, f"{PREFIX}model", str, file=file)
        tokens = _items(metadata, "tokens", str, file)
        types = (
            _items(metadata, "token_type", int, file)
            if f"{PREFIX}token_type" in metadata
            else [TokenType.NORMAL] * len(tokens)
        )
        if len(types) != len(tokens):
            raise TokenizerError(f"{len(tokens)} tokens but {len(types)} token types", file=file)
        pre = get(metadata, f"{PREFIX}pre", str, "default", file=file)
        special = SpecialTokens.read(metadata, file)
        return cls(model, pre, tuple(tokens), tuple(types), special, metadata, file)

    def error(self, problem: str) -> TokenizerError:
        """Return an error about the vocabulary that names the file."""
        return TokenizerError(problem, file=self.file)

    def flag(self, key: str, default: bool) -> bool:
        """Return the bool under `key`, or the default where the file does not say."""
        return get(self.metadata, key, bool, default, file=self.file)

    def ids(self, *types: TokenType) -> dict[str, int]:
        """Return token -> its first id, of the tokens of these types."""
        return {
            self.tokens[i]: i
            for i in range(len(self.tokens) - 1, -1, -1)
            if self.types[i] in types and self.tokens[i]
        }

    def unknown(self) -> int:
        """Return the id of the token for what has no other. Raise TokenizerError without one."""
        if TokenType.UNKNOWN in self.types:
            return self.types.index(TokenType.UNKNOWN)
        if self.special.unk is None:
            raise self.error("the vocabulary has no token for what is unknown")
        return self.special.unk

    @cached_property
    def scores(self) -> list[float]:
        """One score per token. Raise TokenizerError for a short list or scores that are not
        finite.
        """
        scores = _items(self.metadata, "scores", (float, int), self.file)
        if len(scores) != len(self.tokens):
            raise self.error(f"{len(self.tokens)} tokens but {len(scores)} scores")
        for i, score in enumerate(scores):
            if not abs(score) < _LARGEST_SCORE:  # nor for one that is not a number
                raise self.error(f"the score of token {i} is {score}")
        return scores

    @property
    def has_merges(self) -> bool:
        """Whether the file has a list of merges."""
        return f"{PREFIX}merges" in self.metadata

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The pairs that merges join. Raise TokenizerError for one that is not two tokens."""
        pairs = []
        for i, merge in enumerate(_items(self.metadata, "merges", str, self.file)):
            cut = merge.find(" ", 1)
            if cut < 0 or cut == len(merge) - 1:
                raise self.error(
                    f"merge {i} is '{printable(merge, 80)}', expected two tokens with a space"
                    " between"
                )
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Byte -> its token `<0x41>`. Raise TokenizerError for a byte token of another form."""
        found = {}
        typed = TokenType.BYTE in self.types
        for i in range(len(self.tokens) - 1, -1, -1):
            byte = _byte_of(self.tokens[i])
            if self.types[i] == TokenType.BYTE and byte is None:
                raise self.error(
                    f"token {i} is '{printable(self.tokens[i], 80)}', expected a byte such as"
                    " '<0x41>'"
                )
            wanted = TokenType.BYTE if typed else TokenType.NORMAL  # old files have no types
            if byte is not None and self.types[i] == wanted:
                found[byte] = i
        return found


def _byte_of(token: str) -> int | None:
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return int(found[1], 16) if found else None


def _items(
    metadata: dict[str, Value], name: str, kind: type | tuple[type, ...], file: str | None
) -> list:
    key = f"{PREFIX}{name}"
    items = get(metadata, key, list, file=file)
    for i, item in enumerate(items):
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TokenizerError(
                f"item {i} of {key} is not a {'string' if kind is str else 'number'}", file=file
            )
        if isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
            raise TokenizerError(f"item {i} of {key} is not UTF-8", file=file)
    return items
