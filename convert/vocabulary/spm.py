"""SentencePiece vocabularies: `tokenizer.model` (GGUF's `llama` for BPE, `t5` for unigram), and
tokenizer.json files made from one.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ...errors import TokenizerError
from ...formats.tokenizer_hints import SPACE_PREFIX_KEY
from ...formats.values import Value, ValueType, array, boolean, string
from ..checkpoint.folder import Checkpoint
from .sentencepiece import BPE, UNIGRAM, read_sentencepiece
from .special import special_tokens
from .tokens import (
    BYTE,
    TokenTable,
    added_tokens,
    looks_special,
    merges_of,
    named_special_tokens,
    steps_of,
    warn_of_normalizer,
)

SPACE = "\u2581"  # how SentencePiece writes a space


def sentencepiece_model(
    checkpoint: Checkpoint, tokenizer: dict[str, Any], config: dict[str, Any], n_vocab: int
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` from tokenizer.model. `tokenizer` is tokenizer.json,
    or empty.

    Added tokens come from tokenizer_config.json, then from added_tokens.json, then, for ids that
    are still free, from tokenizer.json. Without a tokenizer.json the ids of special tokens are
    those of config.json. Raise TokenizerError for a score that is not finite, or an id that two
    tokens claim.
    """
    model = read_sentencepiece(checkpoint.path / "tokenizer.model")
    table = TokenTable(n_vocab, checkpoint.config.file)
    for number, piece in enumerate(model.pieces):
        if not math.isfinite(piece.score):
            raise TokenizerError(f"piece {number} has score {piece.score}")
        table.place(number, piece.text, piece.type, piece.score)
    for token, number in (checkpoint.json("added_tokens.json") or {}).items():
        table.place_added(number, token, control=False, replace=True)
    for number, (token, special) in added_tokens({}, config).items():
        table.place_added(number, token, special or looks_special(token), replace=True)
    added = added_tokens(tokenizer, {})
    for number, (token, special) in added.items():
        if table.is_free(number):
            table.place_added(number, token, special or looks_special(token))
    keys = {}
    if not model.add_dummy_prefix or isinstance(config.get("add_prefix_space"), bool):
        keys["add_space_prefix"] = boolean(
            model.add_dummy_prefix and config.get("add_prefix_space", True)
        )
    if config.get("legacy") is True and model.kind == BPE:
        keys[SPACE_PREFIX_KEY] = string("metaspace-always")  # as transformers reads such files
    if model.kind == UNIGRAM:
        keys.setdefault("add_space_prefix", boolean(True))  # runtimes assume no space otherwise
        keys["remove_extra_whitespaces"] = boolean(model.remove_extra_whitespaces)
        if model.charsmap:
            keys["precompiled_charsmap"] = array(ValueType.UINT8, list(model.charsmap))
    ids = {token: number for number, (token, _) in added.items()}
    return {
        "model": string("t5" if model.kind == UNIGRAM else "llama"),
        "pre": string("default"),
        **table.keys(scores=True),
        **special_tokens(checkpoint, tokenizer, config, ids, n_vocab),
        **keys,
    }


def is_sentencepiece_like(tokenizer: dict[str, Any]) -> bool:
    """Return whether tokenizer.json holds BPE over characters with byte fallback, as those made
    from SentencePiece models do.
    """
    model = tokenizer["model"]
    return model.get("type", "BPE") == "BPE" and model.get("byte_fallback") is True


def sentencepiece_like(
    checkpoint: Checkpoint, tokenizer: dict[str, Any], config: dict[str, Any], n_vocab: int
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` from tokenizer.json alone.

    Runtimes choose a merge by the score of the resulting token. So a token that merge number n
    produces first gets the score -n, as in the models that such files were made from; single
    characters come after all merges.
    """
    if kinds := [
        step.get("type")
        for step in steps_of(tokenizer.get("normalizer"), "normalizers")
        if not _writes_spaces(step)
    ]:
        warn_of_normalizer(kinds)
    merges = merges_of(tokenizer["model"], SPACE)
    scores: dict[str, float] = {}
    for number, merge in enumerate(merges):
        scores.setdefault(merge.replace(" ", ""), -float(number))
    table = like_table(checkpoint, tokenizer, config, n_vocab, scores, -float(len(merges)))
    scheme = _space_prefix(tokenizer)
    return {
        "model": string("llama"),
        "pre": string("default"),
        **table.keys(scores=True),
        **special_tokens(checkpoint, tokenizer, config, table.ids(), n_vocab),
        "add_space_prefix": boolean(scheme is not None),
        **({SPACE_PREFIX_KEY: string(scheme)} if scheme is not None else {}),
    }


def like_table(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    n_vocab: int,
    scores: dict[str, float],
    default_score: float,
) -> TokenTable:
    """Return the tokens of such a tokenizer.json: bytes as `<0x41>`, added tokens with
    their types.
    """
    table = TokenTable(n_vocab, checkpoint.config.file)
    for token, number in tokenizer["model"]["vocab"].items():
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            table.place(number, token, BYTE, default_score)
        else:
            table.place(number, token, score=scores.get(token, default_score))
    named = named_special_tokens(config)
    for number, (token, special) in added_tokens(tokenizer, config).items():
        table.place_added(
            number, token, special or token in named or looks_special(token), replace=False
        )
    return table


def _writes_spaces(step: dict[str, Any]) -> bool:
    """Return whether a normalizer step does no more than runtimes do: write spaces as U+2581 and
    put one in front.
    """
    return (step.get("type"), step.get("prepend")) == ("Prepend", SPACE) or (
        (step.get("type"), step.get("pattern"), step.get("content"))
        == ("Replace", {"String": " "}, SPACE)
    )


def _space_prefix(tokenizer: dict[str, Any]) -> str | None:
    """Return where a space is put, as a value of `SPACE_PREFIX_KEY`; None for nowhere."""
    if any(
        step.get("type") == "Prepend" and step.get("prepend") == SPACE
        for step in steps_of(tokenizer.get("normalizer"), "normalizers")
    ):
        return "always"
    for step in steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            default = "always" if step.get("add_prefix_space", True) else "never"
            scheme = step.get("prepend_scheme", default)
            return f"metaspace-{scheme}" if scheme in ("always", "first") else None
    return None
