"""The common part of all kinds of vocabularies: the table of tokens with types and scores, added
tokens, tokens with a role.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ...errors import TokenizerError, printable
from ...formats.values import Value, ValueType, array

log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 24
# Token types of GGUF, and of SentencePiece's pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    1,
    2,
    3,
    4,
    5,
    6,
)
UNUSED_SCORE = -10000.0
ADDED_SCORE = -1000.0


class TokenTable:
    """One slot for each of the `n_vocab` rows of the embedding. Ids above them, and ids that are
    used twice, raise TokenizerError.
    """

    def __init__(self, n_vocab: int, config_file: Path):
        if n_vocab > MAX_TOKENS:
            raise TokenizerError(
                f"key 'vocab_size' is {n_vocab}; more than {MAX_TOKENS} tokens are not read",
                file=config_file,
            )
        self._slots: list[str | None] = [None] * n_vocab
        self.types = [UNUSED] * n_vocab
        self.scores = [UNUSED_SCORE] * n_vocab

    def place(
        self,
        number: object,
        token: str,
        type: int = NORMAL,
        score: float = 0.0,
        *,
        replace: bool = False,
    ) -> None:
        """Put a token into its slot. `replace`: it may replace another token, as added tokens may.
        Raise TokenizerError for an id outside the table or in use.
        """
        n_vocab = len(self._slots)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < n_vocab:
            raise TokenizerError(
                f"token '{printable(token)}' has id {printable(number)}; config.json has vocab_size"
                f" {n_vocab}"
            )
        if not replace and self._slots[number] not in (None, token):
            raise TokenizerError(
                f"id {number} is that of '{printable(self._slots[number])}' and of"
                f" '{printable(token)}'"
            )
        try:
            token.encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"token {number} is not valid Unicode") from None
        self._slots[number], self.types[number], self.scores[number] = token, type, score

    def place_added(
        self, number: object, token: str, control: bool, *, replace: bool = False
    ) -> None:
        """Put an added token into its slot: a control token, or a user-defined one, whose spaces
        are stored as they are.
        """
        self.place(
            number, token, CONTROL if control else USER_DEFINED, ADDED_SCORE, replace=replace
        )
        if not control and isinstance(number, int):
            self._slots[number] = token.replace("\u2581", " ")

    def is_free(self, number: object) -> bool:
        """Return whether `number` is an id of the table that has no token yet."""
        return (
            type(number) is int and 0 <= number < len(self._slots) and self._slots[number] is None
        )

    @property
    def tokens(self) -> list[str]:
        """All tokens. Free slots are named `[PAD<id>]`."""
        return [
            f"[PAD{number}]" if token is None else token for number, token in enumerate(self._slots)
        ]

    def ids(self) -> dict[str, int]:
        """Return token -> its first id."""
        return {token: number for number, token in reversed(list(enumerate(self.tokens)))}

    def keys(self, *, scores: bool) -> dict[str, Value]:
        """Return `tokens`, `scores` if the kind of vocabulary has them, and `token_type`."""
        found = {"tokens": array(ValueType.STRING, self.tokens)}
        if scores:
            found["scores"] = array(ValueType.FLOAT32, self.scores)
        return found | {"token_type": array(ValueType.INT32, self.types)}


def added_tokens(tokenizer: dict[str, Any], config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return id -> (content, special). Entries of tokenizer_config.json override others, because
    transformers loads them last. Raise TokenizerError for entries of another form.
    """
    entries = tokenizer.get("added_tokens") or []
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, list) or not isinstance(decoder, dict):
        raise TokenizerError("added tokens are not listed as expected")
    found = {}
    for number, entry in [
        *((e.get("id") if isinstance(e, dict) else None, e) for e in entries),
        *decoder.items(),
    ]:
        if isinstance(number, str) and number.isdecimal() and len(number) < 10:
            number = int(number)
        if (
            type(number) is not int
            or not isinstance(entry, dict)
            or not isinstance(entry.get("content"), str)
        ):
            raise TokenizerError(f"added token {printable(entry)} lacks an id or its content")
        found[number] = (entry["content"], entry.get("special") is True)
    return found


def named_special_tokens(config: dict[str, Any]) -> set[str]:
    """Return the tokens with a role in tokenizer_config.json. transformers treats them as special
    whatever their entries say.
    """
    roles = [
        value
        for key, value in config.items()
        if key.endswith("_token") and not key.startswith("add_")
    ]
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    extra = (
        extra
        if isinstance(extra, list)
        else list(extra.values())
        if isinstance(extra, dict)
        else []
    )
    return {content for item in [*roles, *extra] if (content := content_of(item))}


def merges_of(model: dict[str, Any], space: str) -> list[str]:
    """Return the merges as `a b`. Newer files hold pairs, whose inner spaces are written as
    `space`. Raise TokenizerError for a merge of another form.
    """
    merges, stored = [], model.get("merges") or []
    for merge in stored if isinstance(stored, list) else [stored]:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) and part for part in parts)
        ):
            raise TokenizerError(f"merge {len(merges)}, {printable(merge)}, is not two parts")
        merges.append(" ".join(part.replace(" ", space) for part in parts))
    return merges


def content_of(entry: Any) -> str | None:
    """Return the text of a token that is given as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def looks_special(token: str) -> bool:
    """Return whether a token that is not marked special looks like one, such as `<|...|>` and
    `<unused7>`.
    """
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or bool(
        re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused.*", token, re.DOTALL)
    )


def steps_of(entry: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder of tokenizer.json, with sequences
    flattened.
    """
    if not isinstance(entry, dict):
        return []
    if entry.get("type") != "Sequence":
        return [entry]
    inner = entry.get(parts)
    return [
        step
        for item in (inner if isinstance(inner, list) else [])
        for step in ([item] if isinstance(item, dict) else [])
    ]


def warn_of_normalizer(kinds: list[Any]) -> None:
    """Warn that steps of a normalizer are left out, because this kind of vocabulary has no key for
    them in GGUF.
    """
    log.warning(
        "this tokenizer normalizes texts (%s); GGUF runtimes do not for this kind of vocabulary",
        ", ".join(map(printable, kinds)),
    )
