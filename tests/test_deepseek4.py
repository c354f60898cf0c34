"""DeepSeek V4 layer by layer: what is kept of sequences, ranks with layers, and files that
contradict themselves. That logits are those of transformers is in `test_architectures_random.py`.
"""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import ConfigError, IqforgeError, MalformedFileError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, u32
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.compressed.attention import CompressedAttention
from iqforge.runtime.layers.indexer import best_positions
from iqforge.runtime.layers.layer_input import TokenMoE
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.split_model import make_stage
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.compressed import CachedRows
from iqforge.runtime.state.saved import SavedSequence, save_sequence
from iqforge.runtime.weights.placement import CPU

from .random_models import Models
from .thread_ranks import ThreadMeeting, on_ranks
from .tiny_model import write_gguf

CASE, PLAIN = "deepseek_v4", CacheSettings("f32", "f32")
ENCODED = CacheSettings("q8_0", "f16", hadamard_k=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return Models(tmp_path_factory.mktemp("deepseek4"))


@pytest.fixture(scope="module")
def small(models) -> Path:
    return models.file(CASE, "small")


@pytest.fixture(scope="module")
def tokens(models) -> list[int]:
    return list(models.tiny(CASE, "small").tokens)


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_going_back_needs_a_snapshot(small, tokens):
    with load_model(small) as model:
        state = model.new_state(64, PLAIN)
        model.extend(tokens[:13], state)
        kept = state.snapshot()
        wanted = model.extend(tokens[13:22], state)
        late = state.snapshot()
        with pytest.raises(UsageError, match="cannot go back from token 22 to 9"):
            state.truncate(9)
        assert not state.can_be_cut
        for n in (13, 7, 5):  # other tokens take the places of those that were there
            state.restore(kept)
            assert state.n_past == 13
            model.extend(tokens[20 : 20 + n], state)
        state.restore(kept)
        near(model.extend(tokens[13:22], state), wanted)
        after = model.extend(tokens[22:23], state)
        state.restore(late)
        near(model.extend(tokens[22:23], state), after)
        state.clear()
        near(model.extend(tokens[:13], state), model.forward(tokens[:13])[-1])


@pytest.mark.parametrize("settings", [PLAIN, CacheSettings(), ENCODED])
def test_a_sequence_in_a_file(models, tokens, tmp_path, settings):
    path = models.file(CASE, "wide")
    with load_model(path, cache=settings) as model:
        state = model.new_state(64)
        model.extend(tokens[:21], state)
        save_sequence(tmp_path / "kept", state, tokens[:21], model.source)
        wanted = model.extend(tokens[21:30], state)
        other = model.new_state(512)
        saved = SavedSequence(tmp_path / "kept")
        saved.check(model.source)
        saved.restore(other)
        assert other.n_past == 21
        near(model.extend(tokens[21:30], other), wanted)
        # What a cache rounds is rounded without one, too.
        near(model.forward(tokens[:30])[-1], wanted)
        mixers = [block.mixer for block in model.network.blocks]
        for mixer, layer in zip(mixers, other.layers, strict=True):
            assert layer is not None and isinstance(mixer, CompressedAttention)
            rows = sum(x.n * x.row_bytes for x in (layer.near, *layer.entries))
            waiting = sum(x.nbytes for x in layer.pending)
            assert rows + waiting <= mixer.state_bytes(30, settings)
            assert mixer.state_bytes(0, settings) < mixer.state_bytes(30, settings)


def test_a_saved_state_of_other_sizes(models, small, tokens):
    with load_model(small) as model, load_model(models.file(CASE, "wide")) as other:
        state, wide = model.new_state(64), other.new_state(64)
        model.extend(tokens, state)
        for mine, theirs in zip(state.layers[1:3], wide.layers, strict=False):
            with pytest.raises(UsageError, match="were saved, expected"):
                theirs.load(0, mine.save(0, 0))
        with pytest.raises(UsageError, match="4 values were saved, expected 6"):
            wide.layers[0].load(0, state.layers[2].save(0, 0))


def test_a_pass_that_failed_is_noticed(small, tokens, monkeypatch):
    with load_model(small) as model:
        state = model.new_state(64, PLAIN)
        model.extend(tokens[:6], state)
        kept = state.snapshot()
        state.layers[1].n_seen = 5
        with pytest.raises(UsageError, match="layer 1 has seen 5 tokens, and the next"):
            model.extend(tokens[6:8], state)
        with pytest.raises(UsageError, match="layer 0 has seen 8 tokens, and the next"):
            model.extend(tokens[6:8], state)
        state.restore(kept)
        wanted = model.extend(tokens[6:8], state)
        state.restore(kept)
        # In the first layer, after the keys were added.
        monkeypatch.setattr(CachedRows, "read", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.extend(tokens[6:8], state)
        monkeypatch.undo()
        with pytest.raises(UsageError, match="layer 0 has seen 6 tokens, or more, and the next"):
            model.extend(tokens[6:8], state)
        state.restore(kept)
        near(model.extend(tokens[6:8], state), wanted)


def test_sequences_together_are_those_alone(small, tokens):
    pieces = [(tokens[:9], 5), (tokens[9:14], 1), (tokens[14:31], 3)]
    with load_model(small, ubatch=64) as model:
        wanted = []
        for ids, more in pieces:
            state = model.new_state(64, PLAIN)
            model.extend(ids, state)
            wanted.append(model.extend(tokens[:more], state))
        pool = model.new_pool(128, 3, PLAIN)
        states = [pool.sequence() for _ in pieces]
        model.extend_together([(ids, s) for (ids, _), s in zip(pieces, states, strict=True)])
        found = model.extend_together(
            [(tokens[:more], s) for (_, more), s in zip(pieces, states, strict=True)]
        )
        near(found, torch.stack(wanted))
        rows = torch.tensor([tokens[:12], tokens[12:24]])
        both = model.hidden(rows)
        near(both[1], model.hidden(rows[1:])[0])


def test_positions_matter_only_relative_to_each_other(small, tokens):
    """A sequence that begins at another position: rotations are undone after the softmax."""
    with load_model(small) as model:
        ids = torch.tensor([tokens[:30]])
        torch.testing.assert_close(model.hidden(ids, 50), model.hidden(ids), rtol=0, atol=1e-3)


@pytest.mark.parametrize("shares", [(1, 1), (1, 2, 1)])
def test_ranks_with_layers(small, tokens, shares):
    def evaluated(model: Model) -> list[torch.Tensor]:
        state = model.new_state(64, PLAIN)
        pieces = [model.extend(tokens[i : i + 9], state) for i in range(0, 27, 9)]
        return [model.forward(tokens), *pieces]

    def work(rank: int, meeting: ThreadMeeting) -> list[torch.Tensor]:
        source = open_gguf(small)
        with Model(source, stage=make_stage(source, shares, meeting, CPU), ubatch=5) as model:
            return evaluated(model)

    with load_model(small, ubatch=5) as model:
        wanted = evaluated(model)
    for found in on_ranks(len(shares), work):
        for x, y in zip(found, wanted, strict=True):
            near(x, y)


def test_steps_run_layer_by_layer_and_say_so(small, tokens):
    said = []
    with load_model(small, verbose=said.append) as model:
        model.extend(tokens[:1], model.new_state(64))
    assert len(said) == 1 and said[0].startswith("steps run layer by layer: ")


def test_products_in_8_bits(models, tokens):
    """On the CPU, compiled layers and rounded products give about the same."""
    path = models.quantized(CASE, "Q8_0")
    with load_model(path) as model, load_model(path, precision="int8") as rounded:
        wanted, found = (m.forward(tokens).log_softmax(-1) for m in (model, rounded))
    assert (found - wanted).abs().mean() < 0.05


def test_experts_are_those_of_the_token(small, tokens):
    with load_model(small) as model:
        [first, *_] = [b.module for b in model.network.blocks[0].branches if b.takes_batch][1:]
        assert isinstance(first, TokenMoE)
        x = torch.randn(3, model.network.width, generator=torch.Generator().manual_seed(0))
        batch = Batch.of(1, 3, 0, CPU)
        with pytest.raises(TypeError, match="no tokens"):
            first(x, batch)
        seen = []
        with model.observe(lambda name, x, experts: seen.append((name, experts))):
            model.forward(tokens[:5])
        experts = dict(seen)["blk.0.ffn_down_exps.weight"]
        assert sorted(experts.tolist()) == sorted(first.table[tokens[:5]].flatten().tolist())
        assert isinstance(model.network.blocks[-1].row_layers[0], type(first).__base__)


def test_the_best_of_so_many():
    """Each token may see another number of positions; ties go to those that `topk` takes."""
    scores = torch.randn(9, 7, generator=torch.Generator().manual_seed(3))
    counts = [0, 0, 1, 2, 3, 3, 5, 7, 7]
    found = best_positions(scores, 3, counts)
    for row, count, seen in zip(scores, counts, found, strict=True):
        best = row[:count].topk(min(3, count)).indices
        assert sorted(best.tolist()) == seen.nonzero().flatten().tolist()


def test_statistics_of_inputs(models, tmp_path):
    """Every group of heads has its part of the first output matrix, whose inputs count together."""
    path, texts = models.file(CASE, "wide"), tmp_path / "texts"
    texts.write_text("blocks get a scale, and each weight becomes a small integer; " * 40)
    iqforge.collect_imatrix(path, texts, tmp_path / "imatrix", n_ctx=64)
    out = tmp_path / "quantized.gguf"
    iqforge.quantize_model(path, out, "IQ4_KS", imatrix=tmp_path / "imatrix")
    with open_gguf(out) as source:
        types = {tensor.name: tensor.type.name for tensor in source.tensors}
    assert types["blk.0.attn_output_a.weight"] == "IQ4_KS"
    assert types["blk.0.ffn_gate_tid2eid.weight"] == "I32"
    for kept in ("hc_attn_fn", "hc_ffn_fn", "attn_compressor_ape", "indexer.proj"):
        assert types[f"blk.0.{kept}.weight"] == "F32"


def changed(small: Path, path: Path, **keys) -> Path:
    with open_gguf(small) as source:
        keys = {f"deepseek4.{key.replace('__', '.')}": value for key, value in keys.items()}
        return write_gguf(path, source, metadata=keys)


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ({"attention__compress_ratios": array(ValueType.INT32, [4])}, ConfigError, "has 1 items"),
        (
            {"attention__compress_ratios": array(ValueType.INT32, [0, 4, 8, 4, -1])},
            ConfigError,
            "attention.compress_ratios' is -1",
        ),
        ({"attention__output_group_count": u32(3)}, ConfigError, "expected a multiple of 3 heads"),
        ({"attention__value_length": u32(12)}, ConfigError, "values of 12 elements and keys of 24"),
        ({"attention__head_count_kv": u32(2)}, ConfigError, "key/value heads 2"),
        ({"attention__indexer__key_length": u32(8)}, ConfigError, "indexer.key_length' is 8"),
        ({"hyper_connection__count": u32(2)}, MalformedFileError, "output_hc_fn.weight"),
        ({"hyper_connection__count": u32(1 << 30)}, ConfigError, "hyper_connection.count"),
        ({"hash_layer_count": u32(3)}, MalformedFileError, "blk.2.ffn_gate_tid2eid.weight"),
        ({"expert_count": u32(5)}, IqforgeError, "ffn_gate_tid2eid.weight': has the number 5"),
        ({"attention__sliding_window": None}, IqforgeError, "attention.sliding_window"),
        ({"hash_layer_count": u32(1)}, IqforgeError, "blk.1.ffn_gate_tid2eid.weight"),
    ],
)
def test_files_that_contradict_themselves(small, tmp_path, keys, error, words):
    path = changed(small, tmp_path / "changed.gguf", **keys)
    with pytest.raises(error, match=words):
        load_model(path).close()


def test_a_table_that_is_not_of_integers(small, tmp_path):
    from iqforge.formats.gguf.writer import GGUFWriter
    from iqforge.formats.types import ggml_type

    name = "blk.1.ffn_gate_tid2eid.weight"
    with open_gguf(small) as source:
        infos = [t.with_type(ggml_type("F32")) if t.name == name else t for t in source.tensors]
        with GGUFWriter(tmp_path / "floats.gguf", dict(source.metadata), infos) as writer:
            for old, new in zip(source.tensors, infos, strict=True):
                writer.write(new, np.ascontiguousarray(source.read_rows(old, 0, old.n_rows)))
    with pytest.raises(MalformedFileError, match=f"'{name}': type is F32, expected I32"):
        load_model(tmp_path / "floats.gguf").close()
