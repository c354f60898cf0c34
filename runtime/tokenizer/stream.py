"""Tokens to text while they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

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
        """Return what is left of an incomplete character."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Ends a text before the first of the `stops`. What could begin one of them is held back."""

    def __init__(self, stops: Sequence[str]):
        self.stops = [stop for stop in stops if stop]
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is certain not to belong to a stop; nothing after one is found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self.stops if stop in text]
        if places:
            at, self.found = min(places)
            self._held = ""
            return text[:at]
        kept = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
