"""What every kind of vocabulary has to do. The defaults are those of SentencePiece's relatives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from .vocabulary import TokenType, Vocabulary

SPACE = "\u2581"  # how such vocabularies write a space


class TextModel(ABC):
    """Encodes stretches of text in which no added token occurs, and says what tokens stand for."""

    adds_space = False  # in front of a text before it is encoded
    has_byte_tokens = True  # `<0x41>` is a byte

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    @abstractmethod
    def encode(self, text: str, at_start: bool) -> list[int]:
        """Return ids. at_start: whether the stretch begins the whole text."""

    def added(self, special: bool) -> dict[str, int]:
        """Return the added tokens that are recognized in texts, the special ones only where asked
        for.
        """
        types = [TokenType.USER_DEFINED]
        if special:
            types += [TokenType.CONTROL, TokenType.UNKNOWN]
        return self.vocabulary.ids(*types)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; the UTF-8 text of added tokens."""
        if token in self._byte_of:
            return bytes([self._byte_of[token]])
        text = self.vocabulary.tokens[token]
        if self.vocabulary.types[token] in (TokenType.NORMAL, TokenType.UNUSED):
            return self.spelled(text)
        return text.encode()

    def spelled(self, text: str) -> bytes:
        """Return what the text of a normal token stands for."""
        return text.replace(SPACE, " ").encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without the space that was put in front."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self.adds_space and text.startswith(" ") else text

    @cached_property
    def _byte_of(self) -> dict[int, int]:
        if not self.has_byte_tokens:
            return {}
        return {i: byte for byte, i in self.vocabulary.byte_tokens.items()}
