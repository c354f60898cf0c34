"""The forward pass: against transformers' logits, against plain numpy, and equal for every way of
storing weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import (
    ArchitectureError,
    ConfigError,
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    ShapeError,
    UnsupportedTypeError,
    UsageError,
)
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import f32, i32, string, u32
from iqforge.runtime.layers.rope import Rope, Scaling
from iqforge.runtime.model import load_model
from iqforge.runtime.network.sampling import Sampling

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import PlainForward, one_tensor_per_expert, write_gguf

NAN = float("nan")
TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 40).tolist()]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write llama, qwen3moe, and qwen3moe with merged gate and up, all in F32."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama", head_dim=32)
    make_tiny_qwen3moe(folder / "moe", tied=True, n_heads=4, n_kv_heads=1)
    paths = {}
    for name, source, merge in (
        ("llama", "llama", False),
        ("moe", "moe", False),
        ("merged", "moe", True),
    ):
        with CheckpointSource(open_checkpoint(folder / source), merge_gate_up=merge) as opened:
            paths[name] = write_gguf(folder / f"{name}.gguf", opened)
    return paths


def forward(path, tokens=TOKENS, **options) -> torch.Tensor:
    with load_model(path, **options) as model:
        return model.forward(tokens)


@pytest.mark.parametrize("name", ["llama", "llama31", "mistral", "mixtral", "qwen3_moe"])
def test_logits_are_those_of_transformers(name):
    expected = np.load(shared(f"golden/convert/{name}/logits.npz"))
    logits = forward(
        shared(f"golden/convert/{name}/expected-f32.gguf"), expected["input_ids"]
    ).numpy()
    assert logits.dtype == np.float32 and logits.shape == expected["logits"].shape
    assert np.abs(logits - expected["logits"]).max() < 1e-4
    assert (logits.argmax(1) == expected["logits"].argmax(1)).all()


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_logits_are_those_of_plain_numpy(models, name):
    assert np.abs(forward(models[name]).numpy() - PlainForward(models[name])(TOKENS)).max() < 1e-4


def test_merged_gate_and_up_change_nothing(models):
    torch.testing.assert_close(forward(models["merged"]), forward(models["moe"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "moe", "merged"])
def test_cache_size_changes_nothing_and_runs_repeat(models, name):
    expected = forward(models[name])
    for cache_bytes in (0, 300_000, 2**30):
        with load_model(models[name], cache_bytes=cache_bytes) as model:
            assert torch.equal(model.forward(TOKENS), model.forward(TOKENS))
            assert model.weights.store.cache.used <= cache_bytes
            torch.testing.assert_close(model.forward(TOKENS), expected, rtol=0, atol=1e-5)


def test_large_matrices_are_decoded_in_slices(models, monkeypatch):
    monkeypatch.setattr("iqforge.runtime.weights.encoded.SLICE_BYTES", 4 * 256 * 30)
    torch.testing.assert_close(
        forward(models["llama"], cache_bytes=0), forward(models["llama"]), rtol=0, atol=1e-5
    )


def test_sequences_of_a_batch_do_not_see_each_other(models):
    other = TOKENS[::-1]
    for name in ("llama", "moe"):
        with load_model(models[name]) as model:
            both = model.hidden(torch.tensor([TOKENS, other]))
            for row, tokens in zip(both, (TOKENS, other)):
                torch.testing.assert_close(
                    model.logits(row), model.forward(tokens), rtol=0, atol=1e-5
                )


@pytest.mark.parametrize("type", ["BF16", "F16", "Q8_0", "IQ4_K"])
def test_encoded_weights(models, tmp_path, type):
    with open_gguf(models["moe"]) as source:
        path = write_gguf(
            tmp_path / "q.gguf",
            source,
            lambda t: type if len(t.shape) > 1 and "ffn_gate_inp" not in t.name else "F32",
        )
    assert np.abs(forward(path).numpy() - PlainForward(path)(TOKENS)).max() < 1e-3


def test_interleaved_rows_are_the_same_weights(models, tmp_path):
    def quantized(name: str, type: str):
        with open_gguf(models["moe"]) as source:
            return write_gguf(
                tmp_path / name,
                source,
                lambda t: type if len(t.shape) > 1 and "ffn_gate_inp" not in t.name else "F32",
            )

    plain, interleaved = quantized("plain.gguf", "IQ4_K"), quantized("r4.gguf", "IQ4_K_R4")
    for cache_bytes in (0, 2**30):
        assert torch.equal(
            forward(plain, cache_bytes=cache_bytes), forward(interleaved, cache_bytes=cache_bytes)
        )


def test_one_tensor_per_expert_as_in_old_files(models, tmp_path):
    """Old files have `ffn_up.3.weight` instead of the fourth matrix of `ffn_up_exps.weight`."""
    with open_gguf(models["moe"]) as source:
        one_tensor_per_expert(tmp_path / "old.gguf", source)
    assert torch.equal(forward(tmp_path / "old.gguf"), forward(models["moe"]))


def test_observers_see_every_product(models):
    seen: dict[str, tuple] = {}
    with load_model(models["moe"]) as model:
        with model.observe(lambda name, x, experts: seen.update({name: (x.clone(), experts)})):
            model.forward(TOKENS)
        count = len(seen)
        model.forward(TOKENS)
        assert len(seen) == count and not model.weights.taps.observers
        matrices = {p.name for p in model.weights.parameters}
        assert matrices == set(seen)  # the tied embedding is seen as the output matrix that it is
    x, experts = seen["blk.0.ffn_down_exps.weight"]
    assert (
        x.shape == (2 * len(TOKENS), 256) and len(experts) == len(x) and (experts.diff() >= 0).all()
    )
    assert (
        seen["blk.0.attn_q.weight"][0].shape == (len(TOKENS), 256)
        and seen["blk.0.attn_q.weight"][1] is None
    )


def test_parameters_declare_role_and_split(models):
    for path in models.values():
        with load_model(path) as model:
            for parameter in model.weights.parameters:
                assert parameter.split in ("column", "row", "gate_up", "replicated")
                assert parameter.role
                named = parameter.name.removesuffix(".weight").split(".")[-1]
                assert parameter.role in (named, "output")


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1, 320], [-1], [0.5], [True]])
def test_token_ids_that_are_none(models, tokens):
    with pytest.raises(ShapeError):
        forward(models["llama"], tokens)


def test_a_model_says_what_it_is(models):
    with load_model(models["llama"]) as model:
        assert repr(model) == (
            "<Model llama, 1.15 M parameters, BF16 (32.00 bits per weight), f32 on cpu,"
            f" context 2048: {models['llama']}>"
        )


def test_missing_devices_and_files(models, tmp_path):
    for device in ("cuda:99", "no-such-device"):
        with pytest.raises(UsageError, match="device"):
            load_model(models["llama"], device)
    with pytest.raises(UsageError):
        load_model(models["llama"], cache_bytes=-1)
    with pytest.raises(NotFoundError):
        load_model(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"general.architecture": string("plamo")}, ArchitectureError, "plamo"),
        ({"general.architecture": None}, ConfigError, "general.architecture"),
        ({"llama.block_count": u32(0)}, ConfigError, "block_count.* is 0"),
        ({"llama.block_count": u32(2**31)}, ConfigError, "block_count"),
        ({"llama.block_count": u32(1)}, ArchitectureError, "blk.1."),
        ({"llama.block_count": u32(3)}, MalformedFileError, "blk.2.*missing"),
        ({"llama.block_count": string("2")}, ConfigError, "STRING"),
        ({"llama.attention.head_count": u32(0)}, ConfigError, "head_count.* is 0"),
        ({"llama.attention.head_count_kv": u32(3)}, ConfigError, "4 heads for 3"),
        ({"llama.attention.head_count": None}, ConfigError, "head_count"),
        ({"llama.attention.key_length": u32(2**31 - 1)}, ConfigError, "key_length"),
        ({"llama.embedding_length": u32(512)}, MalformedFileError, r"asks for \[\d+, 512\]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ConfigError, "epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": f32(-1)}, ConfigError, "is -1.0, expected at"),
        ({"llama.attention.layer_norm_rms_epsilon": f32(NAN)}, ConfigError, "expected at least 0"),
        ({"llama.rope.freq_base": f32(1)}, ConfigError, "freq_base' is 1.0, expected more than 1"),
        ({"llama.rope.dimension_count": u32(16)}, ConfigError, "dimension_count"),
        ({"llama.rope.scaling.type": string("longrope")}, ConfigError, "longrope"),
        ({"llama.logit_scale": i32(3)}, ConfigError, "logit_scale"),
    ],
)
def test_metadata_that_contradicts_the_tensors(models, tmp_path, change, error, message):
    with open_gguf(models["llama"]) as source:
        path = write_gguf(tmp_path / "bad.gguf", source, metadata=change)
    with pytest.raises(error, match=message) as raised:
        load_model(path)
    assert isinstance(raised.value, IqforgeError) and str(path) in str(raised.value)


def test_expert_counts_that_cannot_be(models, tmp_path):
    for key, value in (("expert_used_count", 5), ("expert_count", 3), ("expert_gating_func", 9)):
        with open_gguf(models["moe"]) as source:
            path = write_gguf(
                tmp_path / f"{key}.gguf", source, metadata={f"qwen3moe.{key}": u32(value)}
            )
        with pytest.raises((ConfigError, MalformedFileError)):
            load_model(path)


@pytest.mark.parametrize(
    "groups, n_groups_used, message",
    [
        (3, 1, "4 experts cannot be in 3 groups"),
        (2, 3, "cannot be in 2 groups of which 3 are used"),
        (4, 1, "2 of 4 experts cannot be in 1 of 4 groups"),
        (2, 0, "cannot be in 2 groups of which 0 are used"),
    ],
)
def test_groups_of_experts_that_cannot_be(models, tmp_path, groups, n_groups_used, message):
    keys = {"expert_group_count": groups, "expert_group_used_count": n_groups_used}
    changed = {f"qwen3moe.{key}": u32(value) for key, value in keys.items()}
    with open_gguf(models["moe"]) as source:
        path = write_gguf(tmp_path / "groups.gguf", source, metadata=changed)
    with pytest.raises(ConfigError, match=message):
        load_model(path)


def test_a_rotation_of_an_odd_number_of_elements(models, tmp_path):
    with open_gguf(models["moe"]) as source:
        odd = {"qwen3moe.rope.dimension_count": u32(7)}
        path = write_gguf(tmp_path / "odd.gguf", source, metadata=odd)
    with pytest.raises(ConfigError, match="dimension_count' is 7, expected an even number"):
        load_model(path)


def test_sequences_that_do_not_fit_the_call(models):
    with load_model(models["llama"]) as model, load_model(models["llama"]) as other:
        pool = model.new_pool(200, 2)
        for capacity in (0, -1, 257, "x"):
            with pytest.raises(UsageError, match="capacity is .*, expected 1 to 256"):
                pool.sequence(capacity)
        for use in (
            lambda: other.extend([1], pool.sequence(64)),
            lambda: other.extend_together([([1], pool.sequence(64))]),
            lambda: list(other.follow(1, pool.sequence(64), 3, Sampling())),
        ):
            with pytest.raises(UsageError, match="the sequence is of another model"):
                use()
        with pytest.raises(ShapeError, match="no sequences"):
            model.extend_together([])


def test_a_batch_that_finds_no_memory_leaves_all_sequences_as_they_are(models):
    with load_model(models["llama"]) as model:
        pool = model.new_pool(256, 2)
        a, b = pool.sequence(), pool.sequence()
        model.extend_together([(TOKENS[:30], a), (TOKENS[:20], b)])
        free = pool.n_free
        with pytest.raises(UsageError, match="all 256 positions"):
            model.extend_together([(TOKENS * 2, a), (TOKENS * 4, b)])
        assert pool.n_free == free and (a.n_past, b.n_past) == (30, 20)
        together = model.extend_together([([5], a), ([6], b)])
        for tokens, found in (([*TOKENS[:30], 5], together[0]), ([*TOKENS[:20], 6], together[1])):
            expected = model.extend(tokens, model.new_state(64))
            assert torch.allclose(found, expected, atol=2e-3)


def test_missing_and_undecodable_tensors(models, tmp_path):
    from iqforge.formats.gguf.writer import GGUFWriter
    from iqforge.formats.types import ggml_type

    with open_gguf(models["llama"]) as source:
        path = write_gguf(tmp_path / "missing.gguf", source, drop=("blk.1.attn_k.weight",))
        with pytest.raises(MalformedFileError, match="blk.1.attn_k.weight.*missing"):
            load_model(path)
        targets = [
            t.with_type(ggml_type("I16")) if t.name == "blk.1.ffn_up.weight" else t
            for t in source.tensors
        ]
        with GGUFWriter(tmp_path / "strange.gguf", source.metadata, targets) as writer:
            for t in targets:
                writer.write(t, np.zeros(t.n_bytes, dtype=np.uint8))
    with pytest.raises(UnsupportedTypeError, match="blk.1.ffn_up.weight.*I16"):
        load_model(tmp_path / "strange.gguf")


def test_rope_styles_are_the_same_up_to_a_permutation():
    x = torch.randn(1, 5, 2, 16)
    norm, neox = Rope("norm", 16, 10000.0), Rope("neox", 16, 10000.0)
    angles = norm.angles(torch.arange(5))
    interleaved = x.unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2)
    turned = neox(x, angles).unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(norm(interleaved, angles), turned)


def test_rope_leaves_the_rest_of_a_head_alone_and_scales():
    x = torch.randn(1, 5, 2, 16)
    partial = Rope("neox", 8, 10000.0)
    assert torch.equal(partial(x, partial.angles(torch.arange(5)))[..., 8:], x[..., 8:])
    doubled = Rope("neox", 8, 10000.0, scaling=Scaling("linear", 2.0))
    torch.testing.assert_close(
        doubled.angles(torch.arange(0, 10, 2)), partial.angles(torch.arange(5))
    )
    factors = Rope("neox", 8, 10000.0, factors=torch.full((4,), 2.0))
    torch.testing.assert_close(
        factors.angles(torch.arange(0, 10, 2)), partial.angles(torch.arange(5))
    )
