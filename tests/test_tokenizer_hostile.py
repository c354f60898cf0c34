"""SentencePiece vocabularies from hostile or odd files: a named error, or ids, never a crash."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from iqforge.convert.vocabulary.sentencepiece import read_sentencepiece
from iqforge.errors import ConfigError, TokenizerError
from iqforge.formats.values import Value, ValueType, array, string, u32
from iqforge.runtime.tokenizer import Tokenizer
from iqforge.runtime.tokenizer.charsmap import check_charsmap

from .random_texts import random_texts
from .sentencepiece_models import trained_model

KEY = "tokenizer.ggml."


def spm_metadata(**changes: object) -> dict[str, Value]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "a",
        "b",
        "ab",
        "\u2581",
    ]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1]
    lists = {
        "tokens": array(ValueType.STRING, tokens),
        "token_type": array(ValueType.INT32, types),
        "scores": array(ValueType.FLOAT32, [0.0] * len(tokens)),
    }
    values = {"model": string("llama"), **lists, **changes}
    return {KEY + name: value for name, value in values.items() if value is not None}


def replaced(name: str, index: int, item: object) -> Value:
    value = spm_metadata()[KEY + name]
    return array(value.item_type, [*value.data[:index], item, *value.data[index + 1 :]])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"scores": None}, ConfigError, "tokenizer.ggml.scores"),
        ({"scores": array(ValueType.FLOAT32, [0.0])}, TokenizerError, "263 tokens but 1 scores"),
        ({"scores": replaced("scores", 3, float("nan"))}, TokenizerError, "token 3 is nan"),
        ({"scores": replaced("scores", 3, 1e300)}, TokenizerError, "token 3 is 1e\\+300"),
        ({"scores": replaced("scores", 3, "x")}, TokenizerError, "item 3 of .*not a number"),
        ({"tokens": replaced("tokens", 70, "<0xZZ>")}, TokenizerError, "token 70 is '<0xZZ>'"),
        ({"tokens": replaced("tokens", 70, "<0x-1>")}, TokenizerError, "token 70 is '<0x-1>'"),
        ({"token_type": replaced("token_type", 70, 1)}, TokenizerError, "255 of 256 byte tokens"),
        ({"model": string("t5"), "scores": None}, ConfigError, "tokenizer.ggml.scores"),
        ({"model": string("gemma4")}, ConfigError, "tokenizer.ggml.merges"),
        (
            {"model": string("t5"), "precompiled_charsmap": array(ValueType.UINT8, [1, 2])},
            TokenizerError,
            "precompiled_charsmap has 2 bytes",
        ),
    ],
)
def test_sentencepiece_vocabularies_that_do_not_fit(changes: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        Tokenizer.from_metadata(spm_metadata(**changes))


def test_oddities_of_sentencepiece_vocabularies():
    """The same token twice, empty ones and ones with NUL have an id, and nothing becomes them."""
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    assert tokenizer.encode("ab") == [1, 262, 261]
    for index, token in [(3, "<0x00>"), (260, "a"), (260, ""), (260, "b\0"), (260, "[PAD260]")]:
        odd = Tokenizer.from_metadata(spm_metadata(tokens=replaced("tokens", index, token)))
        assert odd.encode("a", add_special=False)[-1] == 259
        assert odd.token_bytes(260) == odd.tokens[260].encode()
    untyped = Tokenizer.from_metadata(
        spm_metadata(token_type=None, unknown_token_id=u32(0), bos_token_id=u32(1))
    )
    assert untyped.decode(untyped.encode("é", add_special=False)) == "é"


@pytest.fixture(scope="module")
def charsmap() -> bytes:
    model = trained_model(model_type="unigram", vocab_size=100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(model)
        return read_sentencepiece(path).charsmap


def test_damaged_charsmaps_are_errors(charsmap: bytes):
    """The library follows offsets without checks: what passes ours must not stop the process."""
    assert check_charsmap(charsmap) is None
    rng = random.Random(0)
    size = int.from_bytes(charsmap[:4], "little")
    n_errors = 0
    for damage in range(20):
        data = bytearray(charsmap)
        if damage < 10:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(1 << damage % 10):
                data[rng.randrange(4 + size if damage % 2 else len(data))] = rng.randrange(256)
        metadata = spm_metadata(
            model=string("t5"), precompiled_charsmap=array(ValueType.UINT8, list(data))
        )
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
        except TokenizerError as error:
            assert "precompiled_charsmap" in str(error)
            n_errors += 1
            continue
        for text in random_texts(20, damage):
            tokenizer.encode(text)
    assert n_errors > 5
