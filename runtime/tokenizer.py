"""The tokenizer of a model, built from nothing but the `tokenizer.ggml.*` metadata of its file.

Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) is supported. Token types decide what text inside
the input can become: control tokens only where `parse_special` asks for it, user-defined tokens
always, unused ones never.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.models import BPE

from ..errors import TokenizerError, printable
from ..formats.pretokenizers import PreTokenizer, pretokenizer
from ..formats.values import Value, get

log = logging.getLogger(__name__)


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Bytes that no UTF-8 text contains: a vocabulary may do without them.
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# Runtimes prepend BOS for these when the file does not say.
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def _byte_symbols() -> list[str]:
    """The character that represents each byte in byte-level vocabularies (GPT-2): itself where
    Latin-1 prints it, else U+0100 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return [
        chr(byte) if byte in printed else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


_SYMBOL_OF = _byte_symbols()
_BYTE_OF = {symbol: byte for byte, symbol in enumerate(_SYMBOL_OF)}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that begin and end a text, None where there are none, and whether the model
    wants them added.
    """

    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False

    @classmethod
    def read(cls, metadata: dict[str, Value], file: str | None = None) -> SpecialTokens:
        """Read any vocabulary, also one that cannot be tokenized with. TokenizerError for ids
        outside of it.
        """
        model = get(metadata, "tokenizer.ggml.model", str, file=file)
        pre = get(metadata, "tokenizer.ggml.pre", str, "", file=file)
        n_tokens = len(get(metadata, "tokenizer.ggml.tokens", list, file=file))

        def token(name: str) -> int | None:
            found = get(metadata, f"tokenizer.ggml.{name}_token_id", int, None, file=file)
            if found is not None and not 0 <= found < n_tokens:
                raise TokenizerError(
                    f"tokenizer.ggml.{name}_token_id is {found}, but there are {n_tokens} tokens",
                    file=file,
                )
            return found

        bos, eos = token("bos"), token("eos")
        by_default = bos is not None and (model == "llama" or pre in _BOS_BY_DEFAULT)
        special = cls(
            bos,
            eos,
            get(metadata, "tokenizer.ggml.add_bos_token", bool, by_default, file=file),
            get(metadata, "tokenizer.ggml.add_eos_token", bool, False, file=file),
        )
        for added, found, name in (
            (special.add_bos, special.bos, "bos"),
            (special.add_eos, special.eos, "eos"),
        ):
            if added and found is None:
                raise TokenizerError(
                    f"tokenizer.ggml.add_{name}_token is set, but there is no {name}_token_id",
                    file=file,
                )
        return special


class Tokenizer:
    """`encode` text to ids, `decode` ids to text. `special` says which tokens are added."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[tuple[str, str]],
        pre: PreTokenizer,
        special: SpecialTokens = SpecialTokens(),
    ):
        self.tokens, self.types, self.merges, self.pre, self.special = (
            tuple(tokens),
            tuple(types),
            tuple(merges),
            pre,
            special,
        )

    @classmethod
    def from_metadata(cls, metadata: dict[str, Value], file: str | None = None) -> Tokenizer:
        """TokenizerError for an unknown model or pre-tokenizer, and for lists that do not fit
        together.
        """
        model = get(metadata, "tokenizer.ggml.model", str, file=file)
        if model != "gpt2":
            raise TokenizerError(
                f"tokenizer model '{printable(model)}' is not supported, only 'gpt2' (byte-level"
                " BPE) is",
                file=file,
            )
        try:
            pre = pretokenizer(get(metadata, "tokenizer.ggml.pre", str, "default", file=file))
        except TokenizerError as error:
            error.file = file
            raise
        tokens = _list(metadata, "tokens", str, file)
        types = (
            _list(metadata, "token_type", int, file)
            if "tokenizer.ggml.token_type" in metadata
            else [TokenType.NORMAL] * len(tokens)
        )
        if len(types) != len(tokens):
            raise TokenizerError(f"{len(tokens)} tokens but {len(types)} token types", file=file)
        return cls(
            tokens, types, _read_merges(metadata, file), pre, SpecialTokens.read(metadata, file)
        )

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, with BOS and EOS as the model wants them if `add_special`.

        With `parse_special` the text of a control token becomes that token; otherwise it is text
        like any other.
        """
        engine = self._with_special if parse_special else self._engine
        ids = engine.encode(text)
        special = self.special
        if add_special and special.add_bos and special.bos is not None:
            ids = [special.bos, *ids]
        if add_special and special.add_eos and special.eos is not None:
            ids = [*ids, special.eos]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves control
        tokens out.
        """
        pieces = bytearray()
        for token in ids:
            if not 0 <= token < len(self.tokens):
                raise TokenizerError(
                    f"token id {token} is outside the vocabulary of {len(self.tokens)}"
                )
            if self.types[token] == TokenType.CONTROL and skip_special:
                continue
            pieces += self.token_bytes(token)
        return pieces.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; the UTF-8 text of added tokens."""
        text = self.tokens[token]
        if self.types[token] == TokenType.NORMAL:
            try:
                return bytes(_BYTE_OF[char] for char in text)
            except KeyError:
                pass
        return text.encode("utf-8", "surrogateescape")

    @cached_property
    def _engine(self) -> _Engine:
        return _Engine(self, {TokenType.USER_DEFINED})

    @cached_property
    def _with_special(self) -> _Engine:
        return _Engine(self, {TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN})


class _Engine:
    """The `tokenizers` object for one choice of recognised added tokens. Its ids are separate and
    without gaps.
    """

    def __init__(self, owner: Tokenizer, added_types: set[TokenType]):
        plain = {
            owner.tokens[i]: i
            for i in range(owner.n_tokens - 1, -1, -1)
            if owner.types[i] in (TokenType.NORMAL, TokenType.BYTE)
        }
        if missing := [
            b for b in range(256) if b not in _NEVER_IN_UTF8 and _SYMBOL_OF[b] not in plain
        ]:
            log.warning(
                "the vocabulary has no token for %d of 256 bytes (first: 0x%02X): they are"
                " dropped from the text",
                len(missing),
                missing[0],
            )
        vocab = {token: k for k, token in enumerate(plain)}
        merges = [(a, b) for a, b in owner.merges if a in vocab and b in vocab and a + b in vocab]
        self.engine = tokenizers.Tokenizer(
            BPE(vocab, merges, ignore_merges=owner.pre.ignore_merges)
        )
        steps = [
            pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in owner.pre.regexes
        ]
        self.engine.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        added = {
            owner.tokens[i]: i
            for i in range(owner.n_tokens - 1, -1, -1)
            if owner.types[i] in added_types and owner.tokens[i]
        }
        self.engine.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
        self.ids = {vocab[token]: i for token, i in plain.items()} | {
            self.engine.token_to_id(text): i for text, i in added.items()
        }

    def encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} of the text is a lone surrogate"
            ) from None
        return [self.ids[k] for k in self.engine.encode(text, add_special_tokens=False).ids]


def _list(metadata: dict[str, Value], name: str, kind: type, file: str | None) -> list:
    key = f"tokenizer.ggml.{name}"
    items = get(metadata, key, list, file=file)
    for i, item in enumerate(items):
        if not isinstance(item, kind):
            raise TokenizerError(
                f"item {i} of {key} is not a {'string' if kind is str else 'number'}", file=file
            )
        if kind is str and any("\ud800" <= char <= "\udfff" for char in item):
            raise TokenizerError(f"item {i} of {key} is not UTF-8", file=file)
    return items


def _read_merges(metadata: dict[str, Value], file: str | None) -> list[tuple[str, str]]:
    pairs = []
    for i, merge in enumerate(_list(metadata, "merges", str, file)):
        cut = merge.find(" ", 1)
        if cut < 0 or cut == len(merge) - 1:
            raise TokenizerError(
                f"merge {i} is '{printable(merge, 80)}', expected two tokens with a space between",
                file=file,
            )
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs
