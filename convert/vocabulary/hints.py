"""Keys for added tokens that take the whitespace next to them, where that does not follow from the
model family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...formats.tokenizer_hints import LSTRIP_KEY, RSTRIP_KEY, implied_strips
from ...formats.values import Value, ValueType, array
from ..checkpoint.folder import Checkpoint
from .tokens import CONTROL, UNKNOWN, USER_DEFINED


def strip_keys(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    keys: dict[str, Value],
) -> dict[str, Value]:
    """Return `iqforge.tokenizer.lstrip` and `.rstrip`, or nothing if they are what is implied.

    tokenizer, config: tokenizer.json and tokenizer_config.json, or empty. keys: those of the
    vocabulary, below `tokenizer.ggml.`.
    """
    tokens, types = keys["tokens"].data, keys["token_type"].data
    added = {
        token: i
        for i, (token, type) in enumerate(zip(tokens, types))
        if type in (CONTROL, USER_DEFINED, UNKNOWN)
    }
    left: dict[int, bool] = {}
    right: dict[int, bool] = {}
    for entry in _entries(tokenizer, config):
        content = entry.get("content")
        if isinstance(content, str) and (i := added.get(content)) is not None:
            left[i], right[i] = entry.get("lstrip") is True, entry.get("rstrip") is True
    family = checkpoint.config.of_text().string("model_type", default="")
    pre = keys["pre"].data if "pre" in keys else ""
    implied = implied_strips(keys["model"].data, pre, family, tokens, types)
    if all(
        {i for i in found if found[i]} == {i for i in expected if i in found}
        for found, expected in zip((left, right), implied)
    ):
        return {}
    return {
        key: array(ValueType.INT32, sorted(i for i in found if found[i]))
        for key, found in ((LSTRIP_KEY, left), (RSTRIP_KEY, right))
    }


def _entries(tokenizer: dict[str, Any], config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what files say about added tokens, the deciding entry of a token last."""
    listed = tokenizer.get("added_tokens")
    decoder = config.get("added_tokens_decoder")
    for entries in (
        listed if isinstance(listed, list) else [],
        [value for key, value in config.items() if key.endswith("_token")],
        decoder.values() if isinstance(decoder, dict) else [],
    ):
        yield from (entry for entry in entries if isinstance(entry, dict))
