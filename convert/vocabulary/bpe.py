"""Byte-level BPE (GGUF's `gpt2`): tokens and merges of tokenizer.json; the pre-tokenizer's name is
derived from its regexes.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from ...errors import TokenizerError, printable
from ...formats.pretokenizers import (
    BYTE_LEVEL_REGEX,
    DIGIT_RUNS_REGEX,
    PRETOKENIZERS,
    SINGLE_DIGITS_REGEX,
    check_name,
    name_of,
)
from ...formats.tokenizer_hints import NFC_KEY
from ...formats.values import Value, ValueType, array, boolean, string
from ..checkpoint.folder import Checkpoint
from .special import special_tokens
from .tokens import (
    TokenTable,
    added_tokens,
    looks_special,
    merges_of,
    named_special_tokens,
    steps_of,
    warn_of_normalizer,
)

log = logging.getLogger(__name__)

SPACE = "\u0120"  # how the byte-level alphabet writes a space


def byte_level_bpe(
    checkpoint: Checkpoint,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    n_vocab: int,
    pre: str | None,
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` from tokenizer.json and tokenizer_config.json. `pre`
    names the pre-tokenizer; by default it is derived.
    """
    model = tokenizer["model"]
    nfc = _normalizes_to_nfc(tokenizer, pre is not None)
    name = check_name(pre) if pre is not None else _pretokenizer_name(tokenizer, nfc)
    table = TokenTable(n_vocab, checkpoint.config.file)
    for token, number in model["vocab"].items():
        table.place(number, token)
    named = named_special_tokens(config)
    for number, (token, special) in added_tokens(tokenizer, config).items():
        table.place_added(number, token, special or token in named or looks_special(token))
    return {
        "model": string("gpt2"),
        "pre": string(name),
        **table.keys(scores=False),
        "merges": array(ValueType.STRING, merges_of(model, SPACE)),
        **special_tokens(checkpoint, tokenizer, config, table.ids(), n_vocab),
        **_normalizer_key(name, nfc),
    }


def has_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Return whether tokenizer.json maps bytes to letters, which marks byte-level BPE."""
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers") + steps_of(
        tokenizer.get("decoder"), "decoders"
    )
    return any(step.get("type") == "ByteLevel" for step in steps)


def _normalizes_to_nfc(tokenizer: dict[str, Any], pre_given: bool) -> bool:
    """Return whether texts are normalized to NFC. Raise TokenizerError for any other normalizer,
    because runtimes apply none, unless the user has named the pre-tokenizer.
    """
    kinds = [step.get("type") for step in steps_of(tokenizer.get("normalizer"), "normalizers")]
    other = next((kind for kind in kinds if kind != "NFC"), None)
    if other is not None and not pre_given:
        raise TokenizerError(
            f"normalizer step {printable(other)} has no counterpart in GGUF; name the pre-tokenizer"
            " with --pre NAME to convert without it"
        )
    if other is not None:
        warn_of_normalizer(kinds)
    return "NFC" in kinds


def _normalizer_key(name: str, nfc: bool) -> dict[str, Value]:
    """Return the key that says whether texts are normalized to NFC, if the name of the
    pre-tokenizer implies otherwise.
    """
    entry = PRETOKENIZERS.get(name)
    implied = entry is not None and entry.nfc
    return {} if nfc == implied else {NFC_KEY.removeprefix("tokenizer.ggml."): boolean(nfc)}


def _pretokenizer_name(tokenizer: dict[str, Any], nfc: bool) -> str:
    return name_of(
        split_regexes(tokenizer.get("pre_tokenizer")),
        ignore_merges=tokenizer["model"].get("ignore_merges") is True,
        nfc=nfc,
    )


def split_regexes(pre_tokenizer: Any) -> tuple[str, ...]:
    """Return the regexes by which a `pre_tokenizer` entry of tokenizer.json splits. Raise
    TokenizerError for a step that has no regex.
    """
    regexes = []
    for step in steps_of(pre_tokenizer, "pretokenizers"):
        kind = step.get("type")
        if kind == "Split":
            regexes.append(_split_regex(step))
        elif kind == "Digits":
            regexes.append(
                SINGLE_DIGITS_REGEX if step.get("individual_digits") else DIGIT_RUNS_REGEX
            )
        elif kind == "ByteLevel":
            if step.get("use_regex", True):
                regexes.append(BYTE_LEVEL_REGEX)
            if step.get("add_prefix_space"):
                log.warning(
                    "this tokenizer puts a space in front of a text; GGUF runtimes do not with this"
                    " kind of vocabulary"
                )
        else:
            raise TokenizerError(
                f"pre-tokenizer step {printable(kind)} has no counterpart in GGUF; name the"
                " pre-tokenizer with --pre NAME"
            )
    return tuple(regexes)


def _split_regex(step: dict[str, Any]) -> str:
    pattern, how = step.get("pattern"), (step.get("behavior"), bool(step.get("invert")))
    # "Removed" with "invert" keeps the matches: the same pieces, as these regexes match every
    # character.
    if how not in (("Isolated", False), ("Removed", True)):
        raise TokenizerError(
            f"a pre-tokenizer that splits with behavior {printable(how[0])}, invert {how[1]}, has"
            " no counterpart in GGUF; name one with --pre NAME"
        )
    for kind, regex in (("Regex", str), ("String", re.escape)):
        if isinstance(pattern, dict) and isinstance(pattern.get(kind), str):
            return regex(pattern[kind])
    raise TokenizerError("a pre-tokenizer step splits by neither a regex nor a string")
