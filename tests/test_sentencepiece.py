"""SentencePiece models: what is read from tokenizer.model, what is refused, and tokenizer.json
files made from one.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.vocabulary.metadata import vocabulary_metadata
from iqforge.convert.vocabulary.sentencepiece import BPE, UNIGRAM, read_sentencepiece
from iqforge.errors import (
    IqforgeError,
    MalformedFileError,
    TokenizerError,
    TruncatedFileError,
    UnsupportedTypeError,
)

from .shared import shared

PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("\u2581a", -0.5, 1),
    ("b", -1.5, 1),
    ("old", -2.0, 5),
]


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def message(*fields: tuple[int, object]) -> bytes:
    """Return a protocol buffer message of ints, floats and bytes."""
    data = b""
    for number, value in fields:
        if isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            data += varint(number << 3 | 2) + varint(len(value)) + value
    return data


def piece(text: str, score: float, kind: int) -> tuple[int, bytes]:
    return 1, message((1, text.encode()), (2, score), *([] if kind == 1 else [(3, kind)]))


def model(kind: int = BPE, *normalizer: tuple[int, object], pieces=PIECES) -> bytes:
    return message(
        *(piece(*entry) for entry in pieces),
        (2, message((3, kind), (43, (1 << 64) - 1))),
        (3, message(*normalizer)),
    )


def test_fields(tmp_path: Path):
    path = tmp_path / "tokenizer.model"
    # An unknown field of 8 bytes.
    path.write_bytes(model() + varint(9 << 3 | 1) + bytes(8))
    read = read_sentencepiece(path)
    assert [(p.text, p.score, p.type) for p in read.pieces] == PIECES
    assert (
        read.kind == BPE
        and read.add_dummy_prefix
        and read.remove_extra_whitespaces
        and read.charsmap == b""
    )
    path.write_bytes(model(UNIGRAM, (2, b"\x01\x02"), (3, 0), (4, 0)))
    read = read_sentencepiece(path)
    assert (
        read.kind == UNIGRAM
        and not read.add_dummy_prefix
        and not read.remove_extra_whitespaces
        and read.charsmap == b"\x01\x02"
    )


@pytest.mark.parametrize(
    "data, kind, words",
    [
        (b"", MalformedFileError, "has no pieces"),
        (b"\x0a", TruncatedFileError, "1 bytes are needed"),
        (b"\x0a\x05ab", TruncatedFileError, "5 bytes are needed, 2 follow"),
        (b"\x0f", MalformedFileError, "wire type 7"),
        (b"\xff" * 20, MalformedFileError, "64 bits"),
        (b"\x08\x01", MalformedFileError, "field 1 is not a message"),
        (message((1, message((2, 1.0)))), MalformedFileError, "no text"),
        (message((1, message((1, b"\xff")))), MalformedFileError, "UTF-8"),
        (message((1, message((1, b"a"), (3, 7)))), MalformedFileError, "impossible"),
        (message((1, message((1, b"a"), (2, 3)))), MalformedFileError, "impossible"),
        (b"IQ== 0\nIg== 1\n", IqforgeError, "tokenizer.model"),  # a tiktoken file under that name
        (model(4), UnsupportedTypeError, "type 4"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, data: bytes, kind: type, words: str):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(kind, match=words):
        read_sentencepiece(path)


def test_every_prefix_of_a_model_is_an_error_or_a_model(tmp_path: Path):
    path = tmp_path / "tokenizer.model"
    whole = model(pieces=PIECES[-3:])
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            read_sentencepiece(path)
        except IqforgeError as error:
            assert "tokenizer.model" in str(error)


def keys_of(folder: Path, n_vocab: int = 270, **files: object) -> dict:
    (folder / "config.json").write_text(json.dumps(files.pop("config", {})))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    with open_checkpoint(folder) as checkpoint:
        return {
            key.removeprefix("tokenizer.ggml."): value.data
            for key, value in vocabulary_metadata(checkpoint, n_vocab).items()
        }


def test_keys(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(model())
    decoder = {
        "0": {"content": "<unk>", "special": True},
        "264": {"content": "\u2581\u2581x", "special": False},
    }
    made = keys_of(
        tmp_path,
        config={"bos_token_id": 1, "eos_token_id": [2, 1]},
        added_tokens={"<y>": 263},
        tokenizer_config={
            "added_tokens_decoder": decoder,
            "add_bos_token": True,
            "add_prefix_space": False,
        },
    )
    assert (
        made["model"] == "llama"
        and made["pre"] == "default"
        and made["bos_token_id"] == 1
        and made["eos_token_id"] == 2
    )
    assert (
        made["add_bos_token"] is True
        and "add_eos_token" not in made
        and made["add_space_prefix"] is False
    )
    assert made["tokens"][257:] == [
        *("<0xFE>", "<0xFF>", "\u2581a", "b", "old"),
        "[PAD262]",
        "<y>",
        "  x",
        *(f"[PAD{number}]" for number in range(265, 270)),
    ]
    assert made["token_type"][:3] == [3, 3, 3] and made["token_type"][257:] == [
        6,
        6,
        1,
        1,
        5,
        5,
        4,
        4,
        5,
        5,
        5,
        5,
        5,
    ]
    assert made["scores"][0] == -1000 and made["scores"][257:265] == [
        0,
        0,
        -0.5,
        -1.5,
        -2,
        -10000,
        -1000,
        -1000,
    ]


def test_unigram_keys(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(model(UNIGRAM, (2, b"\x01\x02"), (3, 0)))
    made = keys_of(tmp_path)
    assert (
        made["model"] == "t5"
        and made["precompiled_charsmap"] == [1, 2]
        and made["remove_extra_whitespaces"] is True
    )
    assert made["add_space_prefix"] is False


@pytest.mark.parametrize(
    "files, pieces, words",
    [
        ({"added_tokens": {"x": 270}}, PIECES, "vocab_size 270"),
        ({"added_tokens": {"x": "1"}}, PIECES, "id 1"),
        ({}, [("a", float("nan"), 1)], "score nan"),
        ({}, PIECES + [("c", 0.0, 1)] * 9, "vocab_size 270"),
    ],
)
def test_vocabularies_that_do_not_fit(tmp_path: Path, files: dict, pieces: list, words: str):
    (tmp_path / "tokenizer.model").write_bytes(model(pieces=pieces))
    with pytest.raises(TokenizerError, match=words) as raised:
        keys_of(tmp_path, **files)
    assert "tokenizer.model" in str(raised.value)


def spm_bigrams(tokens: list[str], scores: list[float], text: str) -> list[str]:
    """Tokenize as runtimes do with such a vocabulary: join the neighbours whose union has the best
    score, repeatedly.
    """
    rank = dict(zip(tokens, scores))
    parts = list(text.replace(" ", "\u2581"))
    while True:
        best = max(
            (
                (rank[a + b], -place)
                for place, (a, b) in enumerate(zip(parts, parts[1:]))
                if a + b in rank
            ),
            default=None,
        )
        if best is None:
            return parts
        place = -best[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_tokens_and_scores_cut_texts_as_the_model_does():
    """tokens.json has transformers' tokens of texts. Texts without added tokens follow from tokens,
    scores and bytes alone.
    """
    folder = shared("golden/convert/tok_spm")
    with open_checkpoint(folder / "hf") as checkpoint:
        made = {key: value.data for key, value in vocabulary_metadata(checkpoint, 520).items()}
    tokens, scores, types = (
        made[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")
    )
    ids = {token: number for number, token in enumerate(tokens)}
    added = [token for token, kind in zip(tokens, types) if kind in (3, 4)]
    n_checked = 0
    for entry in json.loads((folder / "tokens.json").read_text()):
        if entry["text"] and not any(token in entry["text"] for token in added):
            pieces = spm_bigrams(tokens, scores, " " + entry["text"])
            found = [
                number
                for piece in pieces
                for number in (
                    [ids[piece]]
                    if piece in ids
                    else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
                )
            ]
            assert found == entry["ids"], entry["text"]
            n_checked += 1
    assert n_checked > 5


def test_tokenizer_json_without_a_model(tmp_path: Path, caplog):
    """The tokenizer is trained here. The scores, which its tokenizer.json lacks, give the same
    tokens as its merges.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    from .tiny_checkpoint import PROSE

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        [PROSE], trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]  # bytes are ordinary tokens of such files
    made = keys_of(
        tmp_path,
        430,
        tokenizer=stored,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    assert (
        made["model"] == "llama"
        and made["token_type"][:5] == [3, 3, 3, 6, 6]
        and made["add_space_prefix"] is True
    )
    assert (
        made["bos_token_id"] == 1
        and made["unknown_token_id"] == 0
        and made["add_bos_token"] is False
    )
    reread = Tokenizer.from_str(json.dumps(stored))
    words = PROSE.split()
    for start in range(0, len(words) - 5, 5):
        text = " ".join(words[start : start + 5])
        assert spm_bigrams(made["tokens"], made["scores"], " " + text) == reread.encode(text).tokens
    assert not caplog.messages  # runtimes do what this normalizer does
    scores = made["scores"]
    stored["normalizer"]["normalizers"].insert(0, {"type": "NFKC"})
    assert (
        keys_of(tmp_path, 430, tokenizer=stored)["scores"] == scores
        and "normalizes texts (NFKC)" in caplog.text
    )
    stored["normalizer"] = None
    assert keys_of(tmp_path, 430, tokenizer=stored)["add_space_prefix"] is False
    stored["pre_tokenizer"] = {"type": "Metaspace", "prepend_scheme": "first"}
    assert keys_of(tmp_path, 430, tokenizer=stored)["add_space_prefix"] is True
