"""Added tokens that take the whitespace beside them."""

from __future__ import annotations

from ...formats.tokenizer_hints import LSTRIP_KEY, RSTRIP_KEY, implied_strips
from ...formats.values import get
from .vocabulary import Vocabulary


def stripping_tokens(vocabulary: Vocabulary) -> tuple[set[int], set[int]]:
    """Return the ids of tokens that take the whitespace before them, and after them."""
    metadata, file = vocabulary.metadata, vocabulary.file
    if LSTRIP_KEY in metadata or RSTRIP_KEY in metadata:
        left, right = (get(metadata, key, list, [], file=file) for key in (LSTRIP_KEY, RSTRIP_KEY))
        return set(left), set(right)
    family = get(metadata, "general.architecture", str, "", file=file)
    return implied_strips(
        vocabulary.model, vocabulary.pre, family, vocabulary.tokens, vocabulary.types
    )
