"""Gemma 4's vocabulary (GGUF's `gemma4`): BPE over characters with merges, spaces as U+2581, byte
fallback.
"""

from __future__ import annotations

from typing import Any

from ...formats.values import Value, ValueType, array, boolean, string
from ..checkpoint.folder import Checkpoint
from .special import special_tokens
from .spm import SPACE, like_table
from .tokens import ADDED_SCORE, NORMAL, USER_DEFINED, added_tokens, merges_of, named_special_tokens

# Marks around channels and tools. They look special, but models write them into their answers, so
# they must be visible in texts.
_VISIBLE = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)


def gemma4_vocabulary(
    checkpoint: Checkpoint, tokenizer: dict[str, Any], config: dict[str, Any], n_vocab: int
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.`. Merges decide, so every score is the same. A text
    starts with `<bos>` and without a space.

    As in the reference's files, a token of the model's own vocabulary is a control token only if it
    has a role in tokenizer_config.json.
    """
    table = like_table(checkpoint, tokenizer, config, n_vocab, {}, ADDED_SCORE)
    ids, named = table.ids(), named_special_tokens(config)
    for number, (token, _) in added_tokens(tokenizer, config).items():
        if token not in named and token in tokenizer["model"]["vocab"]:
            table.types[number] = NORMAL
    for token in _VISIBLE:
        if token in ids:
            table.types[ids[token]] = USER_DEFINED
    keys = {
        "model": string("gemma4"),
        **table.keys(scores=True),
        "merges": array(ValueType.STRING, merges_of(tokenizer["model"], SPACE)),
        **special_tokens(checkpoint, tokenizer, config, ids, n_vocab),
        "add_space_prefix": boolean(False),
        "add_bos_token": boolean(True),
    }
    if "add_eos_token" not in config:
        # The reference leaves it out; it is the default of runtimes.
        keys.pop("add_eos_token", None)
    return keys
