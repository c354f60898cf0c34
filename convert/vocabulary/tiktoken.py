"""`tiktoken.model` (Kimi) and `hy.tiktoken` (Hunyuan): byte strings with their ranks, converted to
GGUF's byte-level BPE.

A line holds a token in base64 and its rank, which is its id. There are no merges; a token's merge
joins the two pieces that remain last when its bytes are merged by rank. Ids above the ranks are
special tokens, named in tokenizer_config.json, and in Hunyuan's program code. The split regex is
program code outside these files, so the pre-tokenizer's name is derived only for models whose code
is known.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from ...errors import TokenizerError, printable
from ...formats.pretokenizers import check_name
from ...formats.tokenizer_hints import NFC_KEY
from ...formats.values import Value, ValueType, array, boolean, string
from ..checkpoint.folder import Checkpoint
from .special import special_tokens
from .tokens import (
    CONTROL,
    MAX_TOKENS,
    TokenTable,
    added_tokens,
    looks_special,
    named_special_tokens,
)

FILE, HUNYUAN_FILE = FILES = "tiktoken.model", "hy.tiktoken"
_MAX_TOKEN_BYTES = 1024
# By `model_type` of config.json.
_PRE_OF_MODEL = {
    "kimi_k2": "kimi-k2",
    "kimi_k25": "kimi-k2",
    "kimi_vl": "kimi-k2",
}
_RESERVED = 256  # ids after the ranks that Kimi reserves for special tokens
# Hunyuan's special tokens after the ranks. So many others, `<|extra_0|>` and so on, follow.
_OF_HUNYUAN = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>")
_EXTRA = 205


def tiktoken_bpe(
    checkpoint: Checkpoint, file: str, config: dict[str, Any], n_vocab: int, pre: str | None
) -> dict[str, Value]:
    """Return the keys under `tokenizer.ggml.` from a file of this name. Raise TokenizerError for a
    malformed file, and for an unknown pre-tokenizer that is not given.
    """
    hunyuan = file == HUNYUAN_FILE
    ranks = _read_ranks(checkpoint, file)
    known = "hunyuan" if hunyuan and pre is None else pre
    name = _known_pre(checkpoint) if known is None else check_name(known)
    letters = byte_letters()
    table = TokenTable(n_vocab, checkpoint.config.file)
    for token, rank in ranks.items():
        table.place(rank, _spelled(token, letters))
    named = named_special_tokens(config)
    for number, (token, special) in added_tokens({}, config).items():
        table.place_added(number, token, special or token in named or looks_special(token))
    for number, token in enumerate(_special(len(ranks), hunyuan), len(ranks)):
        if table.is_free(number):
            table.place(number, token, CONTROL)
    merges = [
        f"{_spelled(a, letters)} {_spelled(b, letters)}"
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1 and (parts := _parts(ranks, token, rank)) is not None
        for a, b in [parts]
    ]
    return {
        "model": string("gpt2"),
        "pre": string(name),
        **table.keys(scores=False),
        "merges": array(ValueType.STRING, merges),
        **special_tokens(checkpoint, {}, config, table.ids(), n_vocab),
        **({NFC_KEY.removeprefix("tokenizer.ggml."): boolean(True)} if hunyuan else {}),
    }


def _special(first: int, hunyuan: bool) -> list[str]:
    """Return the special tokens that the model's code adds after the ranks, from id `first` on."""
    if hunyuan:
        return [*_OF_HUNYUAN, *(f"<|extra_{number}|>" for number in range(_EXTRA))]
    return [f"<|reserved_token_{number}|>" for number in range(first, first + _RESERVED)]


def _known_pre(checkpoint: Checkpoint) -> str:
    for config in (checkpoint.config, checkpoint.config.of_text()):
        if (found := _PRE_OF_MODEL.get(config.string("model_type", default=""))) is not None:
            return found
    raise TokenizerError(
        "how texts are split is program code, not data, in this kind of vocabulary; name the"
        " pre-tokenizer with --pre NAME"
    )


def _read_ranks(checkpoint: Checkpoint, file: str) -> dict[bytes, int]:
    """Return token -> rank. Ranks are 0, 1, ... without gaps. Hunyuan's code leaves out a token
    that comes again, and counts the others.
    """
    counts = file == HUNYUAN_FILE
    ranks: dict[bytes, int] = {}
    for number, line in enumerate((checkpoint.text(file) or "").splitlines()):
        if not line.strip():
            continue
        parts = line.split()
        try:
            token, rank = (
                base64.b64decode(parts[0], validate=True),
                (int(parts[1]) if len(parts) == 2 and len(parts[1]) < 10 else -1),
            )
        except (binascii.Error, ValueError):
            token, rank = b"", -1
        again = token in ranks
        if counts and again:
            continue
        if not 0 < len(token) <= _MAX_TOKEN_BYTES or not 0 <= rank < MAX_TOKENS or again:
            raise TokenizerError(
                f"line {number + 1}, {printable(line, 60)}, is not a new token in base64 and its"
                " rank"
            )
        ranks[token] = len(ranks) if counts else rank
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"its {len(ranks)} ranks do not count up from 0")
    return ranks


def _parts(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes] | None:
    """Return the last two pieces when the bytes of `token` are merged by ranks below `limit`,
    lowest rank first; None if more pieces remain.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min(
            (ranks.get(a + b, limit), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
        )
        if rank >= limit:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte: the byte itself where it is
    printable Latin-1, else the next from U+0100 on.
    """
    printable_bytes = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable_bytes else next(others)) for byte in range(256)]


def _spelled(token: bytes, letters: list[str]) -> str:
    return "".join(letters[byte] for byte in token)
