"""DeepSeek V4 from checkpoints made here, as it is published and as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.codecs.codec import decode
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from .family_checkpoint import HEADS, VOCAB, D, convert, write
from .family_checks import check_missing, expert_stacks, keys_of, shapes_of

SIZE, ROT, RANK, GROUPS, OUT, INDEX, N_INDEX = 32, 8, 64, 2, 24, 16, 3
EXPERTS, FF, STREAMS = 4, 32, 3
MIXES, FLAT, INNER = (2 + STREAMS) * STREAMS, STREAMS * D, HEADS * SIZE
HF_CLASS = "DeepseekV4ForCausalLM"
CONFIG = {
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "intermediate_size": None,
    "head_dim": SIZE,
    "qk_rope_head_dim": ROT,
    "q_lora_rank": RANK,
    "o_groups": GROUPS,
    "o_lora_rank": OUT,
    "index_n_heads": N_INDEX,
    "index_head_dim": INDEX,
    "index_topk": 5,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 0],
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "moe_intermediate_size": FF,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
ROOT = {
    "embed.weight": ((VOCAB, D), "token_embd.weight"),
    "norm.weight": ((D,), "output_norm.weight"),
    "head.weight": ((VOCAB, D), "output.weight"),
    "hc_head_fn": ((STREAMS, FLAT), "output_hc_fn.weight"),
    "hc_head_base": ((STREAMS,), "output_hc_base.weight"),
    "hc_head_scale": ((1,), "output_hc_scale.weight"),
}
EACH = {
    "attn_norm.weight": ((D,), "attn_norm.weight"),
    "ffn_norm.weight": ((D,), "ffn_norm.weight"),
    **{
        f"hc_{part}_{name}": (shape, f"hc_{part}_{name}.weight")
        for part in ("attn", "ffn")
        for name, shape in (("fn", (MIXES, FLAT)), ("base", (MIXES,)), ("scale", (3,)))
    },
    "attn.attn_sink": ((HEADS,), "attn_sinks.weight"),
    "attn.wq_a.weight": ((RANK, D), "attn_q_a.weight"),
    "attn.q_norm.weight": ((RANK,), "attn_q_a_norm.weight"),
    "attn.wq_b.weight": ((INNER, RANK), "attn_q_b.weight"),
    "attn.wkv.weight": ((SIZE, D), "attn_kv.weight"),
    "attn.kv_norm.weight": ((SIZE,), "attn_kv_a_norm.weight"),
    "attn.wo_a.weight": ((GROUPS * OUT, INNER // GROUPS), "attn_output_a.weight"),
    "attn.wo_b.weight": ((D, GROUPS * OUT), "attn_output_b.weight"),
    "ffn.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "ffn.shared_experts.w1.weight": ((FF, D), "ffn_gate_shexp.weight"),
    "ffn.shared_experts.w2.weight": ((D, FF), "ffn_down_shexp.weight"),
    "ffn.shared_experts.w3.weight": ((FF, D), "ffn_up_shexp.weight"),
}
BIAS = {"ffn.gate.bias": ((EXPERTS,), "exp_probs_b.bias")}


def compressor(stored: str, gguf: str, ratio: int, rows: int, length: int) -> dict:
    return {
        f"{stored}.wkv.weight": ((rows, D), f"{gguf}_kv.weight"),
        f"{stored}.wgate.weight": ((rows, D), f"{gguf}_gate.weight"),
        f"{stored}.ape": ((ratio, rows), f"{gguf}_ape.weight"),
        f"{stored}.norm.weight": ((length,), f"{gguf}_norm.weight"),
    }


LAYERS = [
    EACH,
    EACH
    | BIAS
    | compressor("attn.compressor", "attn_compressor", 4, 2 * SIZE, SIZE)
    | compressor("attn.indexer.compressor", "indexer_compressor", 4, 2 * INDEX, INDEX)
    | {
        "attn.indexer.wq_b.weight": ((N_INDEX * INDEX, RANK), "indexer.attn_q_b.weight"),
        "attn.indexer.weights_proj.weight": ((N_INDEX, D), "indexer.proj.weight"),
    },
    EACH | BIAS | compressor("attn.compressor", "attn_compressor", 128, SIZE, SIZE),
]
NAMES = ROOT | {
    f"layers.{i}.{name}": (shape, f"blk.{i}.{gguf}")
    for i, rows in enumerate(LAYERS)
    for name, (shape, gguf) in rows.items()
}
STACKS = expert_stacks(
    "layers.{layer}.ffn.experts.{expert}.{part}.weight",
    {"gate": (FF, D), "down": (D, FF), "up": (FF, D)},
    range(3),
    {"gate": "w1", "down": "w2", "up": "w3"},
    EXPERTS,
)
SHAPES = shapes_of(NAMES, STACKS)
TABLE = "layers.0.ffn.gate.tid2eid"
CHOSEN = np.random.default_rng(1).integers(EXPERTS, size=(VOCAB, 2))
# What transformers saves under names of its own.
RENAMED = {
    "embed.weight": "model.embed_tokens.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
    "head.weight": "head.weight",
}


def written(folder: Path, config: dict, names=lambda name: name, **more) -> dict[str, np.ndarray]:
    """Write a checkpoint with the table of experts, and `more` tensors, under other names."""
    stored = write(folder, HF_CLASS, config, SHAPES)
    tensors = {**stored, TABLE: CHOSEN, **more}
    save_file({names(name): x for name, x in tensors.items()}, folder / "model.safetensors")
    return stored


def of_transformers(name: str) -> str:
    name = name.replace(".attn.kv_norm.", ".attn.norm.")
    return RENAMED.get(name, name if name.startswith("model.") else f"model.{name}")


def made_of(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Convert a checkpoint: values, of integers as they are, and metadata."""
    with CheckpointSource(open_checkpoint(folder)) as source:
        made = {}
        for tensor in source.tensors:
            rows = source.read_rows(tensor, 0, tensor.n_rows).copy()
            if tensor.type.is_integer:
                assert tensor.type.name == "I32"
                made[tensor.name] = rows.view("<i4").reshape(tensor.shape)
            else:
                values = decode(tensor.type, rows, tensor.n_cols)
                made[tensor.name] = values.reshape(tensor.shape)
        return made, {key: value.data for key, value in source.metadata.items()}


def check(made: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> None:
    wanted = {gguf: stored[name] for name, (_, gguf) in NAMES.items()}
    for gguf, experts in STACKS.items():
        wanted[gguf] = np.stack([stored[name] for name in experts])
    wanted["blk.0.ffn_gate_tid2eid.weight"] = CHOSEN
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name], values), name


def test_tensors_and_keys(tmp_path):
    stored = written(
        tmp_path,
        CONFIG,
        # A bias that nothing uses, a block that predicts further tokens, parts that read images.
        **{
            "layers.0.ffn.gate.bias": np.ones(EXPERTS, np.float32),
            "layers.1.ffn.gate.bias_vl": np.ones(EXPERTS, np.float32),
            "mtp.0.enorm.weight": np.ones(D, np.float32),
            "vision.norm.weight": np.ones(D, np.float32),
        },
    )
    made, metadata = made_of(tmp_path)
    check(made, stored)
    assert keys_of(metadata, "deepseek4") == {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": D,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": SIZE,
        "attention.value_length": SIZE,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.q_lora_rank": RANK,
        "attention.sliding_window": 16,
        "attention.indexer.head_count": N_INDEX,
        "attention.indexer.key_length": INDEX,
        "attention.indexer.top_k": 5,
        "attention.output_group_count": GROUPS,
        "attention.output_lora_rank": OUT,
        "attention.compress_ratios": [0, 4, 128, 0],
        "attention.compress_rope_freq_base": 40000.0,
        "rope.freq_base": 1e4,
        "rope.dimension_count": ROT,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_gating_func": 4,
        "expert_feed_forward_length": FF,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": [10.0] * 3,
        "swiglu_clamp_shexp": [10.0] * 3,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": pytest.approx(1e-6),
        "hash_layer_count": 1,
        "embedding_length_out": FLAT,
    }


def test_names_and_settings_of_transformers(tmp_path):
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rope = {"partial_rotary_factor": ROT / SIZE}
    yarn = CONFIG["rope_scaling"] | {"rope_type": "yarn", "attention_factor": 1.0}
    other = {
        "compress_ratios": None,
        "layer_types": kinds,
        "compress_rates": {kinds[1]: 4, kinds[2]: 128},
        "num_hash_layers": None,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "qk_rope_head_dim": None,
        "rope_scaling": None,
        "compress_rope_theta": None,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 1e4, **rope},
            "compress": {**yarn, "rope_theta": 40000.0, **rope},
        },
    }
    stored = written(tmp_path / "own", CONFIG)
    _, wanted = made_of(tmp_path / "own")
    written(tmp_path / "other", CONFIG | other, of_transformers)
    made, metadata = made_of(tmp_path / "other")
    check(made, stored)
    own = keys_of(wanted, "deepseek4") | {"attention.compress_ratios": [0, 4, 128]}
    assert keys_of(metadata, "deepseek4") == own


def test_rates_may_have_older_names(tmp_path):
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = CONFIG | {"compress_ratios": None, "layer_types": kinds, "compress_rate_hca": 64}
    write(tmp_path, HF_CLASS, config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["deepseek4.attention.compress_ratios"] == [0, 4, 64]


@pytest.mark.parametrize("name", [name for name in SHAPES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, HF_CLASS, CONFIG | {"num_hash_layers": 0}, with_biases(), name)


def with_biases() -> dict:
    return {**SHAPES, "layers.0.ffn.gate.bias": (EXPERTS,)}


def test_a_missing_table_is_named(tmp_path):
    check_missing(tmp_path, HF_CLASS, CONFIG, {**SHAPES, TABLE: (VOCAB, 2)}, TABLE)


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_an_expert_that_is_not_there(tmp_path, wrong):
    table = CHOSEN.copy()
    table[VOCAB - 3, 1] = wrong
    written(tmp_path, CONFIG, **{TABLE: table})
    words = f"'{TABLE}': has expert {wrong}, but config.json has {EXPERTS} experts"
    with pytest.raises(CheckpointError, match=words):
        made_of(tmp_path)


def test_a_table_of_floats(tmp_path):
    written(tmp_path, CONFIG, **{TABLE: CHOSEN.astype(np.float32)})
    with pytest.raises(CheckpointError, match=f"'{TABLE}': has dtype F32, expected I32 or I64"):
        made_of(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"compress_ratios": [0, 4]}, r"ratios are \[0, 4\], expected one of 0 or more for each"),
        ({"compress_ratios": [0, -4, 4]}, "expected one of 0 or more for each of 3 layers"),
        ({"num_hidden_layers": 1 << 30}, "for each of 1073741824 layers"),
        ({"compress_ratios": None, "layer_types": ["x"] * 3}, "'layer_types' has 'x'"),
        (
            {
                "compress_ratios": None,
                "layer_types": ["heavily_compressed_attention"] * 3,
                "compress_rate_hca": 4,
            },
            "ratio of 'heavily_compressed_attention' is 4",
        ),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "must say hash_moe for the first of 3"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"mlp_bias": True}, "'mlp_bias' is true"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
        ({"qk_rope_head_dim": 7}, "'qk_rope_head_dim' is 7, expected an even number"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' is 2"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"hidden_act": "gelu"}, "GGUF's deepseek4 implies silu"),
        (
            {"rope_scaling": CONFIG["rope_scaling"] | {"attention_factor": 1.2}},
            "'attention_factor' is 1.2",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"compress_rope_theta": None}, "'compress_rope_theta'"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, HF_CLASS, CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def packed(folder: Path) -> dict[str, np.ndarray]:
    """Write a checkpoint with matrices in FP8 and experts in FP4, as published. Return what they
    are.
    """
    stored = written(folder, CONFIG)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    random, tensors = np.random.default_rng(5), {TABLE: torch.from_numpy(CHOSEN)}
    for name, values in stored.items():
        stem = name.removesuffix(".weight")
        rows, cols = values.shape if values.ndim == 2 else (0, 0)
        if ".experts." in name:
            codes = random.integers(0, 16, size=(rows, cols))
            exponents = random.integers(120, 130, size=(rows, cols // 32))
            pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
            tensors[name] = torch.from_numpy(pairs.view(np.int8))
            scales = torch.from_numpy(exponents.astype(np.uint8))
            tensors[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
            signs = np.where(codes & 8, -1, 1)
            steps = np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
            stored[name] = (signs * E2M1[codes & 7] * steps).astype(np.float32)
        elif stem.endswith(("wq_a", "wq_b", "wo_a", "shared_experts.w1")):
            exponents = random.integers(120, 130, size=(-(-rows // 16), -(-cols // 16)))
            tensors[name] = torch.from_numpy(values).to(torch.float8_e4m3fn)
            scales = torch.from_numpy(exponents.astype(np.uint8))
            tensors[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
            steps = np.repeat(np.repeat(2.0 ** (exponents - 127.0), 16, 0), 16, 1)[:rows, :cols]
            stored[name] = tensors[name].float().numpy() * steps.astype(np.float32)
        else:
            tensors[name] = torch.from_numpy(values)
    save_torch(tensors, folder / "model.safetensors")
    return stored


def test_published_packing(tmp_path):
    stored = packed(tmp_path)
    made, _ = made_of(tmp_path)
    check(made, stored)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        types = {tensor.name: tensor.type.name for tensor in source.tensors}
    assert {types[name] for name in STACKS} == {"MXFP4"}, "nothing is rounded"


def test_packed_experts_of_other_shapes(tmp_path):
    packed(tmp_path)
    tensors = load_all(tmp_path)
    name = "layers.1.ffn.experts.2.w2"
    scales = torch.zeros(D, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wrong = {**tensors, f"{name}.scale": scales}
    save_torch(wrong, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}.scale': has shape \[{D}, 2\]"):
        made_of(tmp_path)
    short = {**tensors, f"{name}.weight": torch.zeros(D, 12, dtype=torch.int8)}
    save_torch(short, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}.weight': has shape \[{D}, 12\]; MXFP4"):
        made_of(tmp_path)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in load_torch(folder / "model.safetensors").items()}
