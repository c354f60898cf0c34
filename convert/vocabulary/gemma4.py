"""Gemma 4's vocabulary (GGUF's `gemma4`): BPE over characters with its merges, spaces as U+2581,
bytes to fall back to.
"""

from __future__ import annotations

from typing import Any

from ...formats.gguf.values import Value, ValueType, array, boolean, string
from ..checkpoint.folder import Checkpoint
from .special import special_tokens
from .spm import SPACE, like_table
from .tokens import ADDED_SCORE, NORMAL, USER_DEFINED, added_tokens, merges_of, named_special_tokens

# Marks around channels and tools: models write them into their answers, so they must show in a text
# although they look special.
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
    """Keys below `tokenizer.ggml.`. Merges decide, so every score is the same; a text begins with
    `<bos>` and without a space.

    As in files of the reference, of the tokens that the model's own vocabulary has, those with a
    role in tokenizer_config.json alone are control tokens (published ones name the marks of turns
    there).
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
        keys.pop(
            "add_eos_token", None
        )  # left out by the reference; it is what runtimes take anyway
    return keys
