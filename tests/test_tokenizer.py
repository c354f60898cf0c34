"""The tokenizer built from GGUF metadata, against the tokenizer.json that the file was made
from.
"""

from __future__ import annotations

import random

import pytest
import tokenizers
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import ConfigError, TokenizerError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, boolean, string, u32
from iqforge.runtime.tokenizer import SpecialTokens, Tokenizer

from .random_texts import random_texts
from .shared import shared
from .tiny_checkpoint import BOS, make_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("tokenizer"), n_layers=1)
    with CheckpointSource(open_checkpoint(folder)) as source:
        return source.metadata, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def check(metadata, reference, texts) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text).ids, repr(text)
        assert (
            tokenizer.encode(text, add_special=False)
            == reference.encode(text, add_special_tokens=False).ids
        )
        assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


def test_tiny_vocabulary(tiny):
    check(*tiny, random_texts(300, 0))


@pytest.mark.parametrize("name", ["mini-llama", "mini-qwen3moe"])
def test_trained_vocabularies(name):
    folder = shared(f"models/{name}")
    with CheckpointSource(open_checkpoint(folder)) as source:
        check(
            source.metadata,
            tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
            random_texts(1000, seed=1),
        )


@pytest.mark.parametrize("name", ["tok_bpe_added", "tok_bpe_pairs", "qwen2"])
def test_added_tokens(name):
    folder = shared(f"golden/convert/{name}")
    reference = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    with open_gguf(folder / "expected-f32.gguf") as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    rng = random.Random(2)
    for text in random_texts(200, seed=3):
        text = text + rng.choice(added) + rng.choice(["", " ", "x"]) + text[:5]
        assert (
            tokenizer.encode(text, add_special=False, parse_special=True)
            == reference.encode(text, add_special_tokens=False).ids
        ), repr(text)


def test_control_tokens_in_a_text_are_text(tiny):
    tokenizer = Tokenizer.from_metadata(tiny[0])
    bos = tokenizer.special.bos
    assert tokenizer.encode("x", add_special=True)[0] == bos
    as_text = tokenizer.encode(f"x{BOS}y", add_special=False)
    assert bos not in as_text and tokenizer.decode(as_text) == f"x{BOS}y"
    assert tokenizer.encode(f"x{BOS}y", add_special=False, parse_special=True)[1] == bos


def test_end_of_sequence(tiny):
    tokenizer = Tokenizer.from_metadata(tiny[0] | {"tokenizer.ggml.add_eos_token": boolean(True)})
    assert tokenizer.encode("x")[-1] == tokenizer.special.eos
    assert tokenizer.encode("x", add_special=False) == tokenizer.encode("x")[1:-1]


def test_bytes_that_are_not_text(tiny):
    tokenizer = Tokenizer.from_metadata(tiny[0])
    ids = tokenizer.encode("é", add_special=False)
    assert (
        tokenizer.decode(ids[:1]) == "\ufffd"
        and b"".join(map(tokenizer.token_bytes, ids)) == "é".encode()
    )
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TokenizerError, match="9999"):
        tokenizer.decode([9999])


def test_defaults_of_files_that_do_not_say(tiny):
    metadata = {
        key: value for key, value in tiny[0].items() if key != "tokenizer.ggml.add_bos_token"
    }
    assert SpecialTokens.read(metadata).add_bos  # of llama-bpe
    assert not SpecialTokens.read(metadata | {"tokenizer.ggml.pre": string("gpt-2")}).add_bos


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer.ggml.model": string("rwkv")}, "'rwkv' is not supported"),
        ({"tokenizer.ggml.model": string("no_vocab")}, "has no vocabulary"),
        ({"tokenizer.ggml.pre": string("lama-bpe")}, "llama-bpe"),
        ({"tokenizer.ggml.token_type": array(ValueType.INT32, [1, 2])}, "2 token types"),
        ({"tokenizer.ggml.token_type": array(ValueType.STRING, ["a"])}, "not a number"),
        ({"tokenizer.ggml.merges": array(ValueType.STRING, ["a b", "ab"])}, "merge 1 is 'ab'"),
        ({"tokenizer.ggml.merges": array(ValueType.STRING, ["a "])}, "merge 0"),
        ({"tokenizer.ggml.tokens": array(ValueType.STRING, ["\udcff"])}, "UTF-8"),
        ({"tokenizer.ggml.bos_token_id": u32(70000)}, "70000"),
        ({"tokenizer.ggml.bos_token_id": None}, "no bos_token_id"),
    ],
)
def test_vocabularies_that_do_not_fit_together(tiny, change, message):
    metadata = {key: value for key, value in (tiny[0] | change).items() if value is not None}
    if len(metadata["tokenizer.ggml.tokens"].data) == 1:
        metadata.pop("tokenizer.ggml.token_type")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_metadata(metadata)


def test_no_vocabulary_at_all(tiny):
    with pytest.raises(ConfigError, match="tokenizer.ggml.model"):
        Tokenizer.from_metadata({})
