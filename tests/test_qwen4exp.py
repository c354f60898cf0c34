"""Qwen3.8-Flash-Next: which rows n-grams have, what is kept of sequences, and files that contradict
themselves. That logits are those of transformers is in `test_architectures_random.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from iqforge.errors import ConfigError, IqforgeError, MalformedFileError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, u32
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.chosen.attention import BlockAttention
from iqforge.runtime.layers.recurrent.ngrams import Ngrams, NgramSpec
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.saved import SavedSequence, save_sequence
from iqforge.runtime.weights.placement import CPU

from .random_models import Models
from .tiny_model import write_gguf

CASE, PLAIN, END = "qwen4exp", CacheSettings("f32", "f32"), 1
TEXT = [5, 9, END, END, 7, 300, 12, 4, END, 5, 9, 11, 8, 6, 30, 31, 32, 5, END, 9, 5, 9, 17, 3]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("qwen4exp"))


@pytest.fixture(scope="module")
def small(models) -> Path:
    return models.file(CASE, "small")


def near(a: torch.Tensor, b: torch.Tensor, most: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=most)


@pytest.mark.parametrize("size, heads", [(3, 2), (2, 3), (4, 1)])
def test_rows_of_ngrams_are_those_of_transformers(size, heads):
    """Also next to tokens that end texts, at the beginning, and in pieces."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    settings: Any = SimpleNamespace(
        ngram_size=size,
        heads_per_ngram=heads,
        vocab_size=320,
        ngram_vocab_size_base=97,
        seed=1234,
        eos_token_id=END,
        make_ngram_vocab_size_divisible_by=8,
    )
    reference = Qwen4ExpTextNGramEmbedding(settings, (size - 1) * heads, 0)
    with torch.no_grad():  # each row says which one it is
        weight = reference.ngram_embedding.weight
        weight.copy_(torch.arange(len(weight))[:, None])
        wanted = reference(torch.tensor([TEXT]), None)
    spec = NgramSpec(
        size,
        END,
        4,
        tuple(reference.layer_multipliers.tolist()),
        tuple(reference.ngram_heads_offsets.tolist()),
        tuple(reference.ngram_heads_vocab_sizes.tolist()),
    )
    text = torch.tensor([[END] * (size - 1) + TEXT])
    assert torch.equal(spec.rows(text).float(), wanted)
    pieces = [spec.rows(text[:, i : i + size - 1 + 6]) for i in range(0, len(TEXT), 6)]
    assert torch.equal(torch.cat(pieces, dim=1).float(), wanted)


def test_texts_that_end_in_pieces(small):
    """What is kept of a sequence are the last tokens, too."""
    with load_model(small) as model:
        wanted = model.forward(TEXT)
        for length in (1, 5):
            state = model.new_state(64, PLAIN)
            pieces = [TEXT[i : i + length] for i in range(0, len(TEXT), length)]
            near(torch.cat([model.extend(x, state, all_logits=True) for x in pieces]), wanted)
        other = model.forward([*TEXT[:-3], 10, *TEXT[-2:]])
        assert (other[-1] - wanted[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("settings", [PLAIN, CacheSettings("q8_0", "q8_0", True, True)])
def test_a_sequence_in_a_file(models, tmp_path, settings):
    path, tokens = models.file(CASE, "wide"), models.tiny(CASE, "wide").tokens
    with load_model(path, cache=settings) as model:
        state = model.new_state(64)
        model.extend(tokens[:21], state)
        save_sequence(tmp_path / "kept", state, tokens[:21], model.source)
        wanted = model.extend(tokens[21:30], state)
        other = model.new_state(512)
        saved = SavedSequence(tmp_path / "kept")
        saved.check(model.source)
        saved.restore(other)
        near(model.extend(tokens[21:30], other), wanted)
        # What a cache rounds is rounded without one, too.
        near(model.forward(tokens[:30])[-1], wanted, 1e-4)
        network = model.network
        counted = sum(block.state_bytes(256, settings) for block in network.blocks)
        assert network.state_bytes(256, settings, 512) == counted
        assert model.new_state(256).nbytes == counted


def test_blocks_that_do_not_fit_are_not_seen(small):
    """With a budget for all blocks, late tokens have other logits, and early ones the same."""
    with load_model(small) as model:
        wanted = model.forward([*range(2, 42)])
        [attention] = [b.mixer for b in model.network.blocks if isinstance(b.mixer, BlockAttention)]
        spec = attention.indexer.spec
        attention.indexer.spec = replace(spec, top_k=1000)
        found = model.forward([*range(2, 42)])
        seen = spec.top_k + attention.indexer.block - 1
        near(found[:seen], wanted[:seen])
        assert ((found - wanted)[seen + 1 :].abs().amax(1) > 1e-4).any()


def test_a_batch_without_tokens(small):
    with load_model(small) as model:
        [module] = [m for m in model.network.blocks[0].row_layers if isinstance(m, Ngrams)]
        with pytest.raises(TypeError, match="no tokens"):
            module(torch.zeros(3, model.network.stream_width), Batch.of(1, 3, 0, CPU))


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ({"attention.compress_ratios": array(ValueType.INT32, [0, 0, 0])}, ConfigError, "layer 1"),
        ({"attention.indexer.key_length": u32(4)}, ConfigError, "indexer.key_length' is 4"),
        ({"attention.indexer.top_k": u32(3)}, ConfigError, "indexer.top_k' is 3"),
        ({"hyper_connection.count": u32(2)}, MalformedFileError, "blk.0.ple_key.weight"),
        ({"hyper_connection.low_rank": u32(9)}, MalformedFileError, "_down.weight"),
        ({"ple.layers": array(ValueType.INT32, [0, 2])}, ConfigError, "ple.layers' has 2 items"),
        ({"ple.layers": array(ValueType.INT32, [3])}, ConfigError, "ple.layers' is 3"),
        ({"ple.layers": array(ValueType.INT32, [2])}, MalformedFileError, "blk.2.ple_"),
        ({"ple.layers": None}, IqforgeError, "ple_|per_layer_token_embd"),
        ({"ple.ngram_size": u32(4)}, ConfigError, "ple.layer_multipliers' has 3 items"),
        ({"ple.eos_token_id": u32(320)}, ConfigError, "ple.eos_token_id' is 320"),
        (
            {"ple.layer_multipliers": array(ValueType.UINT64, [1, 1 << 60, 1])},
            ConfigError,
            "ple.layer_multipliers' is",
        ),
        (
            {"ple.head_vocab_sizes": array(ValueType.UINT64, [0, 1, 1, 1])},
            ConfigError,
            "ple.head_vocab_sizes' is 0",
        ),
        (
            {"ple.head_offsets": array(ValueType.UINT64, [0, 1, 1, 1000])},
            ConfigError,
            "n-grams have 10.. rows, but per_layer_token_embd.weight has 1",
        ),
    ],
)
def test_files_that_contradict_themselves(small, tmp_path, keys, error, words):
    with open_gguf(small) as source:
        changed = {f"qwen4exp.{key}": value for key, value in keys.items()}
        path = write_gguf(tmp_path / "changed.gguf", source, metadata=changed)
    with pytest.raises(error, match=words):
        load_model(path).close()
