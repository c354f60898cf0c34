"""WordPiece (GGUF's `bert`): the first token of a word starts with U+2581, the others
have no mark.
"""

from __future__ import annotations

from typing import Any

from ...errors import TokenizerError, printable
from ...formats.tokenizer_hints import LOWERCASE_KEY, STRIP_ACCENTS_KEY
from ...formats.values import Value, boolean, string, u32
from ..checkpoint.folder import Checkpoint
from .special import special_tokens
from .tokens import (
    CONTROL,
    NORMAL,
    TokenTable,
    added_tokens,
    looks_special,
    named_special_tokens,
    steps_of,
)

_WORD_START = "\u2581"


def is_wordpiece(tokenizer: dict[str, Any]) -> bool:
    """Return whether a `tokenizer.json` has the model WordPiece."""
    model = tokenizer.get("model")
    return isinstance(model, dict) and model.get("type") == "WordPiece"


def wordpiece(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    n_vocab: int,
    pre: str | None,
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` from tokenizer.json: `##ing` becomes `ing`, `ing`
    becomes `▁ing`, control tokens stay.

    `token_type_count` is the number of segments that the model distinguishes, `type_vocab_size` of
    config.json. Raise TokenizerError for a model without a vocabulary, or tokens with several ids.
    """
    model = tokenizer["model"]
    prefix = model.get("continuing_subword_prefix")
    if not isinstance(model.get("vocab"), dict) or not isinstance(prefix, str) or not prefix:
        raise TokenizerError(
            "a WordPiece model needs 'vocab' and 'continuing_subword_prefix', which is"
            f" {printable(prefix)}"
        )
    named = named_special_tokens(config)
    added = added_tokens(tokenizer, config)
    control = {
        number
        for number, (token, special) in added.items()
        if special or token in named or looks_special(token)
    }
    table = TokenTable(n_vocab, checkpoint.config.file)
    ids: dict[str, int] = {}
    for token, number in [
        *model["vocab"].items(),
        *((token, number) for number, (token, _) in added.items()),
    ]:
        if ids.setdefault(token, number) != number:
            raise TokenizerError(
                f"token '{printable(token)}' has the ids {printable(ids[token])} and"
                f" {printable(number)}"
            )
        if number in control:
            table.place(number, token, CONTROL)
        else:
            table.place(
                number,
                token.removeprefix(prefix) if token.startswith(prefix) else _WORD_START + token,
                NORMAL,
            )
    segments = checkpoint.config.of_text().integer("type_vocab_size", default=1)
    return {
        "token_type_count": u32(segments),
        "model": string("bert"),
        "pre": string(pre or "default"),
        **table.keys(scores=False),
        **special_tokens(checkpoint, tokenizer, config, ids, n_vocab),
        **_normalizer_keys(tokenizer),
    }


def _normalizer_keys(tokenizer: dict[str, Any]) -> dict[str, Value]:
    """Return the keys of a normalizer that keeps capitals or accents; runtimes remove both."""
    keys = {}
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        if step.get("type") == "BertNormalizer":
            lowercase = step.get("lowercase") is not False
            accents = step.get("strip_accents")
            keys = {
                LOWERCASE_KEY: lowercase,
                STRIP_ACCENTS_KEY: lowercase if accents is None else accents is True,
            }
    if all(keys.values()):
        return {}
    return {key.removeprefix("tokenizer.ggml."): boolean(value) for key, value in keys.items()}
