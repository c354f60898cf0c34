"""Answers in channels, as gpt-oss gives them: what it thinks, then what it says.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

from ..tokenizer.stream import TextStream
from ..tokenizer.tokenizer import Tokenizer
from ..tokenizer.vocabulary import TokenType
from .template import Message

_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
_FINAL = "final"


def channel_marks(tokenizer: Tokenizer) -> dict[int, str] | None:
    """Return the tokens between channels; None for a vocabulary that does not have all of them."""
    found = {
        token: text
        for token, (text, kind) in enumerate(zip(tokenizer.tokens, tokenizer.types, strict=True))
        if text in _MARKS and kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }
    return found if len(found) == len(_MARKS) else None


class AnswerStream:
    """Turns the tokens of an answer into text, and into a message. Channels begin with their names
    in brackets, on lines of their own.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._stream = TextStream(tokenizer, special)
        self._marks = None if special else channel_marks(tokenizer)
        self._parts: list[list[str]] = []  # [channel, text]
        self._name: str | None = None  # of the channel that is being opened
        self._hidden = False  # the role between two messages

    def feed(self, token: int) -> str:
        """Return the text that is complete with this token."""
        mark = None if self._marks is None else self._marks.get(token)
        if mark is None:
            text = self._stream.feed(token)
            if self._name is not None:
                self._name += text
                return ""
            return "" if self._hidden else text
        rest = "" if self._hidden or self._name is not None else self._stream.end()
        if mark == "<|channel|>":
            self._name, self._hidden = "", False
        elif mark == "<|message|>":
            self._hidden = False
            name, self._name = (self._name or _FINAL).split(" ")[0].strip(), None
            self._parts.append([name, ""])
            between = "\n\n" if len(self._parts) > 1 else ""
            return f"{rest}{between}[{name}]\n"
        elif mark == "<|start|>":
            self._hidden = True
        return rest

    def end(self) -> str:
        """Return what is left of an incomplete character."""
        return self._stream.end()

    def message(self, text: str) -> Message:
        """Return the message of the assistant whose whole text, as `feed` gave it, is `text`."""
        if not self._parts:
            return {"role": "assistant", "content": text}
        for i, part in enumerate(self._parts):
            begin = f"[{part[0]}]\n"
            _, _, text = text.partition(begin)
            if i + 1 < len(self._parts):
                part[1], end, after = text.partition(f"\n\n[{self._parts[i + 1][0]}]\n")
                text = end + after
            else:
                part[1] = text
        thought = "\n".join(text for name, text in self._parts if name != _FINAL)
        said = "\n".join(text for name, text in self._parts if name == _FINAL)
        message = {"role": "assistant", "content": said}
        return message | {"thinking": thought} if thought else message
