"""Byte-level BPE (`gpt2`), which is also what tiktoken vocabularies are converted to."""

from __future__ import annotations

import logging

import tokenizers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE

from ...errors import TokenizerError, printable
from ...formats.pretokenizers import PreTokenizer, pretokenizer
from ...formats.tokenizer_hints import NFC_KEY
from .text_model import TextModel
from .vocabulary import TokenType, Vocabulary

log = logging.getLogger(__name__)

# Bytes that no UTF-8 text contains: a vocabulary may do without them.
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def _byte_symbols() -> list[str]:
    """Return the character that represents each byte in byte-level vocabularies (GPT-2): itself
    where Latin-1 prints it, else U+0100 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return [
        chr(byte) if byte in printed else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


_SYMBOL_OF = _byte_symbols()
_BYTE_OF = {symbol: byte for byte, symbol in enumerate(_SYMBOL_OF)}


class ByteLevelBPE(TextModel):
    """Encodes stretches of text that have no added tokens. Its `tokenizers` object has its own ids,
    without gaps.
    """

    has_byte_tokens = False

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        plain = vocabulary.ids(TokenType.NORMAL, TokenType.BYTE)
        pre = _pretokenizer(vocabulary)
        _warn_of_missing_bytes(plain)
        vocab = {token: k for k, token in enumerate(plain)}
        if vocabulary.has_merges or vocabulary.pre != "kimi-k2":
            merges = [
                (a, b) for a, b in vocabulary.merges if a in vocab and b in vocab and a + b in vocab
            ]
        else:
            merges = _merges_by_rank(plain)
        self._engine = tokenizers.Tokenizer(BPE(vocab, merges, ignore_merges=pre.ignore_merges))
        if vocabulary.flag(NFC_KEY, pre.nfc):
            self._engine.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in pre.regexes]
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        self._ids = list(plain.values())

    def encode(self, text: str, at_start: bool) -> list[int]:
        return [self._ids[k] for k in self._engine.encode(text, add_special_tokens=False).ids]

    def spelled(self, text: str) -> bytes:
        """Return the bytes that the letters stand for, or the UTF-8 if they stand for none."""
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:
            return text.encode()


def _merges_by_rank(ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a tiktoken vocabulary, whose ids are ranks: every way to make a token of
    two, the lowest rank first.
    """
    return [
        (token[:cut], token[cut:])
        for token in sorted(ids, key=ids.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]


def _pretokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    if "tokenizer.ggml.pre" not in vocabulary.metadata:
        log.warning(
            "%s does not name its pre-tokenizer; 'default' is assumed, which suits few models",
            printable(vocabulary.file or "the file", 400),
        )
    try:
        return pretokenizer(vocabulary.pre)
    except TokenizerError as error:
        error.file = vocabulary.file
        raise


def _warn_of_missing_bytes(plain: dict[str, int]) -> None:
    missing = [b for b in range(256) if b not in _NEVER_IN_UTF8 and _SYMBOL_OF[b] not in plain]
    if missing:
        log.warning(
            "the vocabulary has no token for %d of 256 bytes (first: 0x%02X): they are dropped from"
            " the text",
            len(missing),
            missing[0],
        )
