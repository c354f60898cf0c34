"""Vocabularies in tiktoken.model: tokens, derived merges, special tokens, equal to the
tokenizer.json that they were made from.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.vocabulary.metadata import vocabulary_metadata
from iqforge.convert.vocabulary.tiktoken import byte_letters
from iqforge.errors import TokenizerError

from .tiny_checkpoint import BOS, EOS, tokenizer_json, write_ranks


def keys_of(folder: Path, n_vocab: int = 700, pre: str | None = None) -> dict:
    with open_checkpoint(folder) as checkpoint:
        return {
            key.removeprefix("tokenizer.ggml."): value.data
            for key, value in vocabulary_metadata(checkpoint, n_vocab, pre).items()
        }


def test_merges_are_those_of_the_tokenizer(tmp_path: Path):
    tokens, keys = write_ranks(tmp_path), keys_of(tmp_path)
    pairs = [
        " ".join(merge) if isinstance(merge, list) else merge
        for merge in json.loads(tokenizer_json())["model"]["merges"]
    ]
    assert len(pairs) > 20 and keys["merges"] == pairs
    assert keys["pre"] == "kimi-k2" and keys["model"] == "gpt2"
    n = len(tokens)
    assert keys["tokens"][32] == "Ġ" and keys["tokens"][256:n] == [
        pair.replace(" ", "") for pair in pairs
    ]
    assert keys["tokens"][n : n + 4] == [
        BOS,
        f"<|reserved_token_{n + 1}|>",
        EOS,
        f"<|reserved_token_{n + 3}|>",
    ]
    assert keys["token_type"] == [1] * n + [3] * 256 + [5] * (700 - n - 256)
    assert keys["bos_token_id"] == n and keys["eos_token_id"] == n + 2


def test_letters_are_those_of_byte_level_bpe():
    from tokenizers import pre_tokenizers

    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_splitting_must_be_known(tmp_path: Path):
    write_ranks(tmp_path, model_type="other")
    with pytest.raises(TokenizerError, match="--pre NAME"):
        keys_of(tmp_path)
    assert keys_of(tmp_path, pre="llama-bpe")["pre"] == "llama-bpe"


@pytest.mark.parametrize(
    "lines",
    [
        ["IQ== 0", "IQ== 1"],
        ["IQ== 1"],
        ["IQ=="],
        ["???? 0"],
        ["IQ== x"],
        ["IQ== 99999999999"],
        [],
        [" 0"],
    ],
)
def test_malformed_files(tmp_path: Path, lines: list[str]):
    write_ranks(tmp_path, lines)
    with pytest.raises(TokenizerError, match="tiktoken.model"):
        keys_of(tmp_path)


def test_more_ranks_than_the_embedding_has_rows(tmp_path: Path):
    write_ranks(tmp_path)
    with pytest.raises(TokenizerError, match="vocab_size 260"):
        keys_of(tmp_path, 260)
