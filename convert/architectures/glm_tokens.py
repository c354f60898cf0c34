"""Special tokens that GLM's tokenizer files list without a role."""

from __future__ import annotations

import logging
from typing import ClassVar

from ...formats.values import Value, u32
from .base import Architecture

log = logging.getLogger(__name__)


class GlmTokens(Architecture):
    """Add the ids of beginning of text, end of turn and end of message. In a list of bases it comes
    before the architecture.
    """

    special_tokens: ClassVar[dict[str, str]] = {
        "bos_token_id": "[gMASK]",
        "eot_token_id": "<|user|>",
        "unknown_token_id": "<|endoftext|>",
        "eom_token_id": "<|observation|>",
    }
    names_win = True  # over what the checkpoint's files say of them

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        keys = super().vocabulary(pre)
        ids = {
            token: number
            for number, token in reversed(list(enumerate(keys["tokenizer.ggml.tokens"].data)))
        }
        for key, token in self.special_tokens.items():
            own = f"tokenizer.ggml.{key}"
            if own in keys and not self.names_win:
                continue
            if token in ids:
                keys[own] = u32(ids[token])
            else:
                log.warning(
                    "the vocabulary has no token '%s', which is %s for this kind of model",
                    token,
                    key,
                )
        return keys
