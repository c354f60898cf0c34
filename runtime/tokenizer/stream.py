"""Tokens to text while they come."""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer
from .vocabulary import TokenType


class TextStream:
    """Turns tokens into text, in pieces that end at whole characters. Control tokens are left out
    unless `special`.

    from_start: the first token begins a text, so the space that `encode` puts in front is left out.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False, from_start: bool = False):
        self.tokenizer, self.special = tokenizer, special
        self._strips = from_start and tokenizer.adds_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that is complete with this token. Bytes that cannot become UTF-8 are
        U+FFFD.
        """
        if not self.special and self.tokenizer.types[token] == TokenType.CONTROL:
            return ""
        piece = self.tokenizer.token_bytes(token)
        if self._strips and piece:
            piece, self._strips = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def end(self) -> str:
        """Return what is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)
