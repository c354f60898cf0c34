"""Added tokens: texts that become one token wherever they occur, before anything else is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tokenizers
from tokenizers.models import WordLevel


class AddedTokens:
    """Splits texts at added tokens, the leftmost and longest first, as `tokenizers` does.

    ids: token -> id. lstrip, rstrip: ids of tokens that take the whitespace before or after them.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        lstrip: Collection[int] = (),
        rstrip: Collection[int] = (),
    ):
        # A model without words makes one unknown token of each stretch between added tokens.
        rest = "rest"
        while rest in ids:
            rest += "_"
        self._engine = tokenizers.Tokenizer(WordLevel({rest: 0}, unk_token=rest))
        self._engine.add_tokens(
            [
                tokenizers.AddedToken(
                    text, lstrip=i in lstrip, rstrip=i in rstrip, normalized=False
                )
                for text, i in ids.items()
            ]
        )
        self._ids = {
            number: i
            for text, i in ids.items()
            if (number := self._engine.token_to_id(text)) not in (None, 0)
        }

    def split(self, text: str) -> list[str | int]:
        """Return the stretches of text between added tokens, and the ids of these tokens."""
        if not self._ids:
            return [text] if text else []
        found = self._engine.encode(text, add_special_tokens=False)
        return [
            self._ids[number] if number else text[begin:end]
            for number, (begin, end) in zip(found.ids, found.offsets)
        ]
