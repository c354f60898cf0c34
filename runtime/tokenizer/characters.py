"""BPE over characters with merges and byte fallback, spaces as U+2581 (`gemma4`)."""

from __future__ import annotations

import tokenizers
from tokenizers import normalizers
from tokenizers.models import BPE

from .text_model import SPACE, TextModel
from .vocabulary import TokenType, Vocabulary


class CharacterBPE(TextModel):
    """Encodes stretches of text that have no added tokens."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        self._unreachable = _unreachable_tokens(vocabulary)
        plain = {
            token: i
            for token, i in vocabulary.ids(TokenType.NORMAL, TokenType.BYTE).items()
            if token not in self._unreachable
        }
        unk = vocabulary.special.unk
        unk_token = None if unk is None else vocabulary.tokens[unk]
        if unk_token is not None and unk is not None:
            plain.setdefault(unk_token, unk)
        vocab = {token: k for k, token in enumerate(plain)}
        merges = [
            (a, b) for a, b in vocabulary.merges if a in vocab and b in vocab and a + b in vocab
        ]
        self._engine = tokenizers.Tokenizer(
            BPE(
                vocab,
                merges,
                unk_token=unk_token,
                fuse_unk=True,
                byte_fallback=bool(vocabulary.byte_tokens),
            )
        )
        self._engine.normalizer = normalizers.Replace(" ", SPACE)
        self._ids = list(plain.values())

    def encode(self, text: str, at_start: bool) -> list[int]:
        return [self._ids[k] for k in self._engine.encode(text, add_special_tokens=False).ids]

    def added(self, special: bool) -> dict[str, int]:
        return (self._unreachable if special else {}) | super().added(special)


def _unreachable_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return normal tokens of several characters that no merge makes, with their ids.

    Files of this kind give most added tokens the type of normal ones. Text cannot become such a
    token in any other way, so these are the added ones.
    """
    made = {a + b for a, b in vocabulary.merges}
    byte_tokens = set(vocabulary.byte_tokens.values())
    return {
        token: i
        for token, i in vocabulary.ids(TokenType.NORMAL).items()
        if len(token) > 1 and token not in made and i not in byte_tokens
    }
