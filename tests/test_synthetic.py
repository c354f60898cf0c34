"""Random models: valid blocks of every type, sane activations, sizes of the real ones, no memory
for repeated rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.cuda_kernels.packed.repeat import repeat_rows
from iqforge.errors import DeviceError, IqforgeError
from iqforge.formats.codecs import codec
from iqforge.formats.types import TYPES
from iqforge.formats.values import u32
from iqforge.runtime import memory
from iqforge.runtime.bench.bench import Test, run_test
from iqforge.runtime.bench.memory_check import synthetic_memory
from iqforge.runtime.bench.random_blocks import random_rows, supported
from iqforge.runtime.bench.repeated_rows import RepeatedRows, rows_per_page_run
from iqforge.runtime.bench.synthetic import SyntheticSource, llama3_factors
from iqforge.runtime.model import Model

WEIGHT_TYPES = [name for name in codec.decodable_types() if name not in ("F64", "I2_S")]


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_random_rows_have_the_requested_size(name):
    n_cols = 512
    rows = random_rows(name, 32, n_cols, 0.02, np.random.default_rng(3))
    assert rows.shape == (32, TYPES[name].row_bytes(n_cols))
    values = codec.decode(name, rows, n_cols, as_weights=True).astype(np.float64)
    assert np.sqrt((values**2).mean()) == pytest.approx(
        0.02, rel=0.3 if name.startswith("MXFP4") else 0.03
    )
    assert abs(values.mean()) < 0.2 * 0.02
    assert np.array_equal(rows, random_rows(name, 32, n_cols, 0.02, np.random.default_rng(3)))
    assert not np.array_equal(rows, random_rows(name, 32, n_cols, 0.02, np.random.default_rng(4)))


def test_types_that_are_no_weights():
    assert [name for name in TYPES if not supported(name)] == [
        "F64",
        "I8",
        "I16",
        "I32",
        "I64",
        "I2_S",
    ]
    with pytest.raises(IqforgeError, match="I32"):
        random_rows("I32", 4, 32, 1.0, np.random.default_rng(0))


def test_sums_in_the_header_of_q8_kv():
    rows = random_rows("Q8_KV", 4, 64, 0.1, np.random.default_rng(0))
    assert (
        rows[:, 8:].view(np.int8).sum(1, dtype=np.int64).tolist()
        == rows[:, 4:8].copy().view("<i4")[:, 0].tolist()
    )


def test_rows_repeat():
    n = rows_per_page_run(24, 4)
    rows = np.random.default_rng(0).integers(0, 256, (n, 24), dtype=np.uint8)
    view = RepeatedRows(rows, 3 * n + 1).view
    assert view.shape == (4 * n, 24) and all(
        np.array_equal(view[k * n : (k + 1) * n], rows) for k in range(4)
    )
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


@pytest.mark.parametrize(
    "spec",
    [
        "llama-tiny:IQ4_K",
        "llama-tiny:Q8_0",
        "llama-tiny:Q4_K_R4",
        "llama-tiny:F16",
        "qwen3moe-tiny:IQ2_KS,attn_v=Q6_K",
        "qwen35-tiny:IQ4_K",
    ],
)
def test_activations_neither_vanish_nor_overflow(spec):
    source = SyntheticSource(spec)
    with Model(source, torch.device("cpu")) as model:
        tokens = torch.randint(
            0, model.n_vocab, (1, 64), generator=torch.Generator().manual_seed(1)
        )
        hidden = model.hidden(tokens)
        logits = model.logits(hidden[0])
        assert 0.5 < float(hidden.std()) < 2 and 0.5 < float(logits.std()) < 2
        assert len(set(logits.argmax(-1).tolist())) > 8  # the output depends on the input
    with SyntheticSource(spec) as again, SyntheticSource(spec, seed=1) as other:
        tensor = again.tensors[-1]
        assert np.array_equal(source.read_rows(tensor, 0, 32), again.read_rows(tensor, 0, 32))
        assert not np.array_equal(source.read_rows(tensor, 0, 32), other.read_rows(tensor, 0, 32))


def test_sizes_are_those_of_the_real_models():
    def parameters(shape):
        source = SyntheticSource(f"{shape}:IQ4_K")
        return sum(tensor.n_elements for tensor in source.tensors), {
            tensor.name: tensor.type.name for tensor in source.tensors
        }

    n, types = parameters("llama-8b")
    assert n == 8030261248 + 64  # the checkpoint's, and rope_freqs
    assert (
        types["token_embd.weight"],
        types["output.weight"],
        types["blk.3.ffn_down.weight"],
        types["blk.3.ffn_norm.weight"],
    ) == ("Q6_K", "Q6_K", "IQ4_K", "F32")
    assert parameters("llama-70b")[0] == 70553706496 + 64
    n, types = parameters("qwen3-30b-a3b")
    assert n == 30532122624 and types["blk.0.ffn_gate_inp.weight"] == "F32"
    types = {t.name: t.type.name for t in SyntheticSource("llama-8b:Q8_0,attn_v=Q6_K").tensors}
    assert types["output.weight"] == "Q8_0" and types["blk.9.attn_v.weight"] == "Q6_K"


def test_layers_of_delta_nets():
    with SyntheticSource("qwen3.5-35b-a3b:IQ4_K") as source:
        tensors = {tensor.name: tensor for tensor in source.tensors}
        rows = source.read_rows(tensors["blk.0.ssm_a"], 0, 1).view(np.float32)
    assert (rows < 0).all()  # states decay
    with_attention = [layer for layer in range(40) if f"blk.{layer}.attn_q.weight" in tensors]
    assert with_attention == list(range(3, 40, 4))
    assert tensors["blk.3.attn_q.weight"].shape == (2 * 16 * 256, 2048)  # queries and gates
    assert tensors["blk.0.attn_qkv.weight"].shape == (2 * 16 * 128 + 32 * 128, 2048)
    assert tensors["blk.0.ssm_conv1d.weight"].type.name == "F32"
    assert tensors["blk.9.ffn_gate_up_exps.weight"].shape == (256, 2 * 512, 2048)
    assert "blk.9.ffn_gate_exps.weight" not in tensors


def test_first_layers_of_a_shape():
    whole, part = (SyntheticSource(f"deepseek-v3:IQ4_K{x}") for x in ("", ",layers=12"))
    prefixes = {f"blk.{layer}." for layer in range(12, 61)}
    kept = [t for t in whole.tensors if not any(t.name.startswith(x) for x in prefixes)]
    assert [(t.name, t.shape, t.type) for t in part.tensors] == [
        (t.name, t.shape, t.type) for t in kept
    ]
    assert part.metadata["deepseek2.block_count"] == u32(12)
    same = SyntheticSource("deepseek-v3:IQ4_K,layers=61")
    assert same.metadata == whole.metadata and same.tensors == whole.tensors


@pytest.mark.parametrize(
    "spec, numbers",
    [
        ("deepseek-v3:IQ4_K,layers=3", "'3' layers, expected 4 to 61"),
        ("qwen3-next-80b-a3b:IQ4_K,layers=3", "expected 4 to 48"),
        ("gemma4-e4b:IQ4_K,layers=12", "expected 42 to 42"),
        ("llama-tiny:IQ4_K,layers=3", "expected 1 to 2"),
        ("llama-tiny:IQ4_K,layers=", "'' layers"),
        ("llama-tiny:IQ4_K,layers", "not NAME=TYPE or layers=N"),
    ],
)
def test_layers_that_a_shape_cannot_have(spec, numbers):
    with pytest.raises(IqforgeError, match=numbers):
        SyntheticSource(spec)


def test_a_large_tensor_is_a_view():
    with SyntheticSource("llama-70b:IQ4_K") as source:
        tensor = next(t for t in source.tensors if t.name == "output.weight")
        rows = source.read_rows(tensor, 0, tensor.n_rows)
        assert rows.nbytes == tensor.n_bytes > 8e8 and not rows.flags.owndata


@pytest.mark.parametrize("name", ["IQ4_K", "IQ4_KS", "Q4_K_R4"])
@pytest.mark.parametrize("rows, n_matrices", [(8, 1), (100, 1), (52, 3), (4, 2)])
def test_packed_rows_that_repeat(name, rows, n_matrices):
    stored = random_rows(name, 16, 512, 0.1, np.random.default_rng(0))
    all_rows = np.tile(stored, (-(-rows * n_matrices // 16), 1))[: rows * n_matrices]
    whole = pack_matrix(name, [all_rows], rows, 512, n_matrices, "cpu")
    repeated = repeat_rows(pack_matrix(name, [stored], 16, 512, 1, "cpu"), rows, n_matrices)
    assert torch.equal(whole.data, repeated.data) and (
        repeated.rows,
        repeated.n_matrices,
        repeated.type,
    ) == (rows, n_matrices, whole.type)


def test_the_period_of_a_tensor():
    with SyntheticSource("qwen3moe-tiny:IQ2_KS") as source:
        for tensor in source.tensors:
            n = source.period(tensor)
            rows = source.read_rows(tensor, 0, tensor.n_rows)
            assert n % tensor.type.group_rows == 0 and (
                n >= len(rows) or np.array_equal(rows[n:], rows[:-n])
            )


def test_frequency_factors():
    factors = llama3_factors(128, 500000.0)
    assert factors[0] == 1 and factors[-1] == 8 and np.all(np.diff(factors) >= 0)
    assert factors[:29].max() == 1 and factors[35:].min() == 8  # as in converted files of Llama 3.1


@pytest.mark.parametrize(
    "spec, words",
    [
        ("llama-9b:IQ4_K", "no shape 'llama-9b'"),
        ("llama-8b", "a type is needed"),
        ("llama-8b:IQ9_K", "unknown ggml type"),
        ("llama-8b:IQ4_K,attn_v", "not NAME=TYPE"),
        ("llama-8b:IQ4_K,attn_x=Q6_K", "no tensor has 'attn_x'"),
        ("llama-8b:I2_S", "no random weights"),
        ("qwen3moe-tiny:Q4_K,ffn_down_exps=I32", "no random weights"),
    ],
)
def test_specs_that_are_wrong(spec, words):
    with pytest.raises(IqforgeError, match=words):
        SyntheticSource(spec)


def test_the_memory_of_the_cpu_is_checked_before_a_test(monkeypatch):
    """70 billion random weights need little memory, as their rows repeat; a long context needs
    much.
    """
    with Model(SyntheticSource("llama-70b:IQ4_K"), cache_bytes=64 << 20) as model:
        [cpu] = synthetic_memory(model, context=8, rows=8)
        assert cpu.device.type == "cpu" and cpu.weights < 256 << 20 < model.memory()[0].weights
        [longer] = synthetic_memory(model, context=1 << 20, rows=8)
        assert longer.cache == 80 * 2 * 2 * 8 * 128 * (1 << 20)
        monkeypatch.setattr(memory, "free_bytes", lambda device: 128 << 20)
        with pytest.raises(DeviceError, match=r"cpu has 128 MiB free, .* takes \d+ MiB.*weights"):
            run_test(model, Test(n_prompt=8, n_gen=1))


def test_memory_that_is_held_is_not_counted_again():
    with Model(SyntheticSource("llama-tiny:Q4_0")) as model:
        [before] = synthetic_memory(model, context=8)
        model.forward([*range(8)])  # enough rows for decoded matrices
        [after] = synthetic_memory(model, context=8)
        assert before.weights - after.weights == model.weights.store.cache.used > 0
