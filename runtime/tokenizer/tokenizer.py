"""The tokenizer of a model: text to ids, ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...errors import TokenizerError, printable
from ...formats.pretokenizers import CHARACTER_NAMES
from ...formats.values import Value
from .added import AddedTokens
from .byte_level import ByteLevelBPE
from .characters import CharacterBPE
from .spm import SentencePiece
from .strip import stripping_tokens
from .text_model import TextModel
from .unigram import UnigramModel
from .vocabulary import SpecialTokens, TokenType, Vocabulary
from .wordpiece import WordPieceModel

# By `tokenizer.ggml.model`.
_MODELS: dict[str, type[TextModel]] = {
    "gpt2": ByteLevelBPE,
    "llama": SentencePiece,
    "t5": UnigramModel,
    "gemma4": CharacterBPE,
    "bert": WordPieceModel,
}


class Tokenizer:
    """`encode` text to ids, `decode` ids to text. `special` says which tokens are added."""

    def __init__(self, vocabulary: Vocabulary):
        """Raise TokenizerError for an unknown kind of vocabulary or pre-tokenizer."""
        self.vocabulary = vocabulary
        self.tokens, self.types = vocabulary.tokens, vocabulary.types
        self.special: SpecialTokens = vocabulary.special
        kind = vocabulary.model
        if kind == "gpt2" and vocabulary.pre in CHARACTER_NAMES:
            kind = "gemma4"
        if kind not in _MODELS:
            raise vocabulary.error(_unsupported(kind))
        self._model: TextModel = _MODELS[kind](vocabulary)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Value], file: str | None = None) -> Tokenizer:
        """Raise TokenizerError for an unknown model or pre-tokenizer, and for lists that do not fit
        together.
        """
        return cls(Vocabulary.read(metadata, file))

    @property
    def n_tokens(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.tokens)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of `text`, with BOS and EOS as the model wants them if
        `add_special`.

        With `parse_special` the text of a control token becomes that token; otherwise it is text
        like any other. Raise TokenizerError for a text with a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} of the text is a lone surrogate"
            ) from None
        ids: list[int] = []
        added = self._with_special if parse_special else self._user_defined
        for number, part in enumerate(added.split(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part, at_start=number == 0)
        special = self.special
        if add_special and special.add_bos and special.bos is not None:
            ids.insert(0, special.bos)
        if add_special and special.add_eos and special.eos is not None:
            ids.append(special.eos)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of `ids`, without the space that `encode` put in front. Bytes that are
        not UTF-8 become U+FFFD. `skip_special` leaves control tokens out. Raise TokenizerError for
        an id outside the vocabulary.
        """
        kept = []
        for token in ids:
            if not 0 <= token < len(self.tokens):
                raise TokenizerError(
                    f"token id {token} is outside the vocabulary of {len(self.tokens)}"
                )
            if not (skip_special and self.types[token] == TokenType.CONTROL):
                kept.append(token)
        return self._model.decode(kept)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; the UTF-8 text of added tokens."""
        return self._model.token_bytes(token)

    @property
    def adds_space(self) -> bool:
        """Whether a space is put in front of a text before it is encoded."""
        return self._model.adds_space

    @cached_property
    def _user_defined(self) -> AddedTokens:
        return self._added(special=False)

    @cached_property
    def _with_special(self) -> AddedTokens:
        return self._added(special=True)

    def _added(self, special: bool) -> AddedTokens:
        return AddedTokens(self._model.added(special), *stripping_tokens(self.vocabulary))


def _unsupported(model: str) -> str:
    if model in ("none", "no_vocab"):
        return "the file has no vocabulary, so texts cannot be tokenized"
    return (
        f"tokenizer model '{printable(model)}' is not supported; supported are {', '.join(_MODELS)}"
    )
