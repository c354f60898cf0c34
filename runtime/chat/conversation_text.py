"""A conversation as a template takes it, and the tokens of what the template makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from ..tokenizer.tokenizer import Tokenizer
from .template import Message


def conversation_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of what a template made: texts of control tokens become these tokens, and
    BOS is in front once if the model wants it.
    """
    special = tokenizer.special
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    if special.add_bos and special.bos is not None and tokens[:1] != [special.bos]:
        tokens.insert(0, special.bos)
    return tokens


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose system message is in front of the first one of the user."""
    system, rest = messages[0], list(messages[1:])
    for i, message in enumerate(rest):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            rest[i] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": system["content"]}, *rest]
