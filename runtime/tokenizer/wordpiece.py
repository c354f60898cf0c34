"""WordPiece (`bert`): words are cut greedily from the left. GGUF marks the first token of a word
with U+2581, where tokenizer.json marks the others with `##`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from ...formats.tokenizer_hints import LOWERCASE_KEY, STRIP_ACCENTS_KEY
from .text_model import SPACE, TextModel
from .vocabulary import TokenType, Vocabulary

_CONTINUED = "##"


class WordPieceModel(TextModel):
    """Encodes stretches of text that have no added tokens."""

    has_byte_tokens = False

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        unk = vocabulary.unknown()
        plain = {
            _with_marks(token): i for token, i in reversed(vocabulary.ids(TokenType.NORMAL).items())
        }
        unk_token = vocabulary.tokens[unk]
        plain[unk_token] = unk
        self._engine = tokenizers.Tokenizer(
            WordPiece(
                {token: k for k, token in enumerate(plain)},
                unk_token=unk_token,
                max_input_chars_per_word=100,
            )
        )
        lowercase = vocabulary.flag(LOWERCASE_KEY, True)
        self._engine.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=vocabulary.flag(STRIP_ACCENTS_KEY, lowercase),
        )
        self._engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._ids = list(plain.values())

    def encode(self, text: str, at_start: bool) -> list[int]:
        return [self._ids[k] for k in self._engine.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return words with spaces between, and none before a full stop and the like."""
        words = []
        for token in ids:
            text = self.vocabulary.tokens[token]
            normal = self.vocabulary.types[token] == TokenType.NORMAL
            words.append(_with_marks(text) if normal else text)
        return decoders.WordPiece(prefix=_CONTINUED, cleanup=True).decode(words)


def _with_marks(token: str) -> str:
    return token[1:] if token.startswith(SPACE) else _CONTINUED + token
