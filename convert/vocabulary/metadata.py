"""Make the `tokenizer.*` keys of a GGUF file from the tokenizer files of a checkpoint.

The kind of vocabulary is, in this order: byte-level BPE in tokenizer.json; tokenizer.model
(SentencePiece); a tokenizer.json made from one, or WordPiece; tiktoken.model or hy.tiktoken. Each
has its own file in this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import TokenizerError, printable
from ...formats.values import Value
from ..checkpoint.folder import Checkpoint
from .bpe import byte_level_bpe, has_byte_level
from .chat_template import chat_template_metadata
from .hints import strip_keys
from .spm import is_sentencepiece_like, sentencepiece_like, sentencepiece_model
from .tiktoken import FILES, tiktoken_bpe
from .wordpiece import is_wordpiece, wordpiece

# (checkpoint, tokenizer.json, tokenizer_config.json, n_vocab) -> keys below `tokenizer.ggml.`
Reader = Callable[[Checkpoint, dict[str, Any], dict[str, Any], int], dict[str, Value]]


def vocabulary_metadata(
    checkpoint: Checkpoint, n_vocab: int, pre: str | None = None, reader: Reader | None = None
) -> dict[str, Value]:
    """Return all keys about the checkpoint's tokenizer. Each of the `n_vocab` rows of the
    embedding gets a token.

    `pre` names the pre-tokenizer; by default it is derived. `reader` reads a tokenizer.json that
    only one family has. Raise TokenizerError for another kind of vocabulary, for ids above
    `n_vocab` or used twice, for malformed merges, and for an unknown pre-tokenizer.
    """
    file = checkpoint.path / "tokenizer.json"
    model_file = checkpoint.path / "tokenizer.model"
    tokenizer = checkpoint.json("tokenizer.json")
    config = checkpoint.json("tokenizer_config.json") or {}
    try:
        if tokenizer is not None and (
            reader is not None or not model_file.exists() or has_byte_level(tokenizer)
        ):
            keys = _from_json(checkpoint, tokenizer, config, n_vocab, pre, reader)
        elif reader is None and model_file.exists():
            file = model_file
            keys = sentencepiece_model(checkpoint, tokenizer or {}, config, n_vocab)
        elif reader is None and (found := _tiktoken_file(checkpoint)) is not None:
            file = checkpoint.path / found
            keys = tiktoken_bpe(checkpoint, found, config, n_vocab, pre)
        else:
            others = "" if reader else f" or from tokenizer.model, {' or '.join(FILES)}"
            raise TokenizerError(f"is missing; a vocabulary is read from it{others}")
    except TokenizerError as error:
        error.file = error.file or file
        raise
    keys |= strip_keys(checkpoint, tokenizer or {}, config, keys)
    return {
        **{
            key if key.startswith("iqforge.") else f"tokenizer.ggml.{key}": value
            for key, value in keys.items()
        },
        **chat_template_metadata(checkpoint, config),
    }


def _tiktoken_file(checkpoint: Checkpoint) -> str | None:
    return next((name for name in FILES if (checkpoint.path / name).exists()), None)


def _from_json(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    n_vocab: int,
    pre: str | None,
    reader: Reader | None,
) -> dict[str, Value]:
    if reader is None and is_wordpiece(tokenizer):
        return wordpiece(checkpoint, tokenizer, config, n_vocab, pre)
    model = tokenizer.get("model")
    if (
        not isinstance(model, dict)
        or model.get("type", "BPE") != "BPE"
        or not isinstance(model.get("vocab"), dict)
    ):
        kind = model.get("type") if isinstance(model, dict) else None
        raise TokenizerError(
            f"vocabularies of type {printable(kind)} are not supported yet; BPE, SentencePiece and"
            " WordPiece are"
        )
    if reader is not None:
        return reader(checkpoint, tokenizer, config, n_vocab)
    if is_sentencepiece_like(tokenizer) and not has_byte_level(tokenizer):
        return sentencepiece_like(checkpoint, tokenizer, config, n_vocab)
    if is_sentencepiece_like(tokenizer) == has_byte_level(tokenizer):
        raise TokenizerError(
            "is neither byte-level BPE nor BPE that falls back to bytes; other kinds are not"
            " supported yet"
        )
    return byte_level_bpe(checkpoint, tokenizer, config, n_vocab, pre)
