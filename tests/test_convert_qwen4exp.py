"""Qwen3.8-Flash-Next from checkpoints made here, as published and as transformers saves it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError
from safetensors.numpy import save_file

from .family_checkpoint import EXPERTS, HEADS, KV_HEADS, VOCAB, D, convert, write
from .family_checks import check_missing, dense_rows, expert_stacks, keys_of, shapes_of

CLASS = "Qwen4ExpForConditionalGeneration"
HEAD, STREAMS, RANK, KEYS, VALUES, SIZE, EXPERT = 8, 3, 10, 2, 4, 6, 20
INDEX_HEADS, INDEX, GRAM_HEADS, ROWS = 2, 4, 4, 40
WIDE, CHANNELS, INNER = STREAMS * D, 2 * KEYS * SIZE + VALUES * SIZE, VALUES * SIZE
SHARDS = (13, 14, 13)  # rows of the table in each
CONSTANTS = {
    "layer_multipliers": [3_000_000_000_017, 5_000_000_000_003, 7_000_000_000_001],
    "ngram_heads_offsets": [0, 9, 18, 29],
    "ngram_heads_vocab_sizes": [9, 9, 11, 11],
}
TEXT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 7,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT,
    "shared_expert_intermediate_size": EXPERT,
    "hc_count": STREAMS,
    "hc_lowrank": RANK,
    "indexer_n_heads": INDEX_HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": INDEX,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "split_ngram_parts": len(SHARDS),
    "mtp_num_hidden_layers": 1,
}


def mixer(stored: str, gguf: str) -> dict:
    return {
        f"{stored}.hc_norm.weight": ((WIDE,), f"{gguf}_norm.weight"),
        f"{stored}.input_mix_weight_down.weight": ((RANK, WIDE), f"{gguf}_down.weight"),
        f"{stored}.input_mix_weight_up.weight": ((WIDE, RANK), f"{gguf}_up.weight"),
    }


LAYER = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "mlp.shared_expert_gate.weight": ((1, D), "ffn_gate_inp_shexp.weight"),
    **dense_rows(D, EXPERT, "mlp.shared_expert.", "_shexp"),
}
for _half, _gguf in (("attn", "hc_attn"), ("mlp", "hc_ffn")):
    LAYER |= mixer(f"{_half}_hyper_connection", _gguf)
    _inject = f"{_half}_hyper_connection.block_inject_weight.weight"
    LAYER[_inject] = ((STREAMS, WIDE), f"{_gguf}_inject.weight")
DELTA = {
    "linear_attn.in_proj_qkv.weight": ((CHANNELS, D), "attn_qkv.weight"),
    "linear_attn.in_proj_z.weight": ((INNER, D), "attn_gate.weight"),
    "linear_attn.in_proj_a.weight": ((VALUES, D), "ssm_alpha.weight"),
    "linear_attn.in_proj_b.weight": ((VALUES, D), "ssm_beta.weight"),
    "linear_attn.A_log": ((VALUES,), "ssm_a"),
    "linear_attn.dt_bias": ((VALUES,), "ssm_dt.bias"),
    "linear_attn.conv1d.weight": ((CHANNELS, 1, 4), "ssm_conv1d.weight"),
    "linear_attn.norm.weight": ((SIZE,), "ssm_norm.weight"),
    "linear_attn.out_proj.weight": ((D, INNER), "ssm_out.weight"),
}
NGRAMS = {
    "ple.key_proj.weight": ((WIDE, D), "ple_key.weight"),
    "ple.value_proj.weight": ((D, D), "ple_value.weight"),
    "ple.conv1d.weight": ((WIDE, 1, 4), "ple_conv1d.weight"),
    **{f"ple.norm_{x}.weight": ((WIDE,), f"ple_norm_{x}.weight") for x in ("key", "query", "conv")},
}
ATTENTION = {
    "self_attn.q_proj.weight": ((2 * HEADS * HEAD, D), "attn_q.weight"),
    "self_attn.k_proj.weight": ((KV_HEADS * HEAD, D), "attn_k.weight"),
    "self_attn.v_proj.weight": ((KV_HEADS * HEAD, D), "attn_v.weight"),
    "self_attn.o_proj.weight": ((D, HEADS * HEAD), "attn_output.weight"),
    "self_attn.q_norm.weight": ((HEAD,), "attn_q_norm.weight"),
    "self_attn.k_norm.weight": ((HEAD,), "attn_k_norm.weight"),
    "self_attn.indexer.q_layernorm.weight": ((INDEX,), "indexer.q_norm.weight"),
    "self_attn.indexer.k_layernorm.weight": ((INDEX,), "indexer.k_norm.weight"),
}
PREFIX = "model.language_model."
INDEX_QK = f"{PREFIX}layers.1.self_attn.indexer.index_qk_proj.weight"
TABLE = f"{PREFIX}layers.0.ple.ple_embedding."


def table() -> dict:
    """Return stored name -> shape, GGUF name, of what becomes one tensor."""
    found: dict = {
        f"{PREFIX}embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
        "lm_head.weight": ((VOCAB, D), "output.weight"),
    }
    for name, (shape, gguf) in mixer("hyper_connection_mixer", "output_hc").items():
        found[PREFIX + name] = shape, gguf
    for layer, rows in enumerate((LAYER | DELTA | NGRAMS, LAYER | ATTENTION)):
        for name, (shape, gguf) in rows.items():
            found[f"{PREFIX}layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return found


STACKS = expert_stacks(
    PREFIX + "layers.{layer}.mlp.experts.{expert}.{part}_proj.weight",
    {"gate": (EXPERT, D), "up": (EXPERT, D), "down": (D, EXPERT)},
    (0, 1),
    n_experts=EXPERTS,
)
SHAPES = {
    **shapes_of(table(), STACKS),
    INDEX_QK: ((INDEX_HEADS + 1) * INDEX, D),
    **{
        f"{TABLE}ngram_embedding.shard_{i}.weight": (n, D // GRAM_HEADS)
        for i, n in enumerate(SHARDS)
    },
}
OTHERS = {"model.visual.patch_embed.proj.bias": (8,), "mtp.fc.weight": (D, 2 * D)}
ADDED = (  # norms that are stored minus 1
    *("hc_norm.weight", "_layernorm.weight", "ple.norm_key.weight", "ple.norm_query.weight"),
    *("ple.norm_conv.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)


def config(**changes) -> dict:
    own = {"tie_word_embeddings": None, "head_dim": None, "intermediate_size": None}
    own["image_token_id"] = 300
    return own | {"text_config": TEXT | changes}


def written(folder: Path, settings: dict, shapes: dict, constants: dict | None = None) -> dict:
    """Write a checkpoint with the integers of n-grams. Return its random tensors."""
    stored = write(folder, CLASS, settings, shapes)
    integers = {
        TABLE + name: np.array(values, np.int64)
        for name, values in (CONSTANTS if constants is None else constants).items()
    }
    save_file(stored | integers, folder / "model.safetensors")
    return stored


def value_heads(values: np.ndarray, axis: int, size: int, first: int = 0) -> np.ndarray:
    """Return values with the heads of values, `size` elements each from `first` on, of each key
    head in turn.
    """
    heads = np.arange(VALUES).reshape(KEYS, -1).T.ravel()
    order = first + (heads[:, None] * size + np.arange(size)).ravel()
    return np.take(values, np.concatenate([np.arange(first), order]), axis)


def moved(name: str, values: np.ndarray) -> np.ndarray:
    if name.endswith(ADDED):
        return values + 1
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
        return value_heads(values, 0, 1)
    if name.endswith("A_log"):
        return value_heads(-np.exp(values.astype(np.float64)).astype(np.float32), 0, 1)
    if name.endswith("in_proj_z.weight"):
        return value_heads(values, 0, SIZE)
    if name.endswith(("in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        return value_heads(values, 0, SIZE, CHANNELS - INNER)
    return value_heads(values, 1, SIZE) if name.endswith("out_proj.weight") else values


KEYS_MADE = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": D,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    "rope.dimension_sections": [1, 1, 0, 0],
    "rope.dimension_count": 4,
    "rope.freq_base": 1e7,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": EXPERT,
    "expert_shared_feed_forward_length": EXPERT,
    "ssm.conv_kernel": 4,
    "ssm.state_size": SIZE,
    "ssm.group_count": KEYS,
    "ssm.time_step_rank": VALUES,
    "ssm.inner_size": INNER,
    "attention.recurrent_layers": [True, False],
    "full_attention_interval": 2,
    "hyper_connection.count": STREAMS,
    "hyper_connection.low_rank": RANK,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX,
    "attention.indexer.top_k": 8,
    "attention.compress_ratios": [0, 4],
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 7,
    "ple.image_token_id": 300,
    "embedding_length_per_layer_input": D // GRAM_HEADS,
    "ple.layer_multipliers": CONSTANTS["layer_multipliers"],
    "ple.head_offsets": CONSTANTS["ngram_heads_offsets"],
    "ple.head_vocab_sizes": CONSTANTS["ngram_heads_vocab_sizes"],
}


@pytest.mark.parametrize("kinds", ["published", "saved"])
def test_tensors_and_keys(tmp_path, kinds):
    """What transformers saves has another word for layers with attention. Blocks that predict
    further tokens, and what reads images, are left out.
    """
    saved = {"layer_types": ["linear_attention", "indexed_attention"]}
    stored = written(tmp_path, config(**(saved if kinds == "saved" else {})), SHAPES | OTHERS)
    made, metadata = convert(tmp_path)
    wanted = {gguf: moved(name, stored[name]) for name, (_, gguf) in table().items()}
    wanted |= {gguf: np.stack([stored[x] for x in experts]) for gguf, experts in STACKS.items()}
    queries = INDEX_HEADS * INDEX
    wanted["blk.1.indexer.q_proj.weight"] = stored[INDEX_QK][:queries]
    wanted["blk.1.indexer.k_proj.weight"] = stored[INDEX_QK][queries:]
    shards = [stored[f"{TABLE}ngram_embedding.shard_{i}.weight"] for i in range(len(SHARDS))]
    wanted["per_layer_token_embd.weight"] = np.concatenate(shards)
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name].ravel(), values.ravel()), name
    assert made["blk.0.ple_conv1d.weight"].shape == (WIDE, 4)
    assert keys_of(metadata, "qwen4exp") == KEYS_MADE


def test_without_ngrams(tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if ".ple." not in name}
    write(tmp_path, CLASS, config(ple_layer_ids=[]), shapes)
    made, metadata = convert(tmp_path)
    assert "per_layer_token_embd.weight" not in made
    assert not [key for key in metadata if ".ple." in key or "per_layer" in key]


@pytest.mark.parametrize("name", [name for name in SHAPES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    words = re.escape(f"'{name.replace(PREFIX, 'model.')}': is missing")
    shapes = {other: shape for other, shape in SHAPES.items() if other != name}
    written(tmp_path, config(), shapes)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layer_multipliers": None}, "layer_multipliers': is missing"),
        ({"layer_multipliers": [1, 2]}, r"is I64 \[2\], expected 3 integers"),
        ({"layer_multipliers": [1, -2, 3]}, r"is \[1, -2, 3\], which no table has"),
        ({"layer_multipliers": [1, 2, 1 << 60]}, "which no table has"),
        ({"ngram_heads_offsets": [0, 9, 9, 29]}, "which no table has"),
        ({"ngram_heads_vocab_sizes": [9, 0, 11, 11]}, "which no table has"),
        ({"ngram_heads_vocab_sizes": [9, 9, 11, 12]}, "have 40 rows of F32, expected at least 41"),
    ],
)
def test_integers_that_are_refused(tmp_path, change, words):
    constants = {name: x for name, x in (CONSTANTS | change).items() if x is not None}
    written(tmp_path, config(), SHAPES, constants)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("shard_3.weight", (1, D // GRAM_HEADS), "split_ngram_parts 3"),
        ("weight", (1, D // GRAM_HEADS), "is one shard too many"),
        ("shard_1.weight", (14, 9), r"has shape \[14, 9\], config.json implies rows of 8"),
    ],
)
def test_shards_that_are_refused(tmp_path, name, shape, words):
    written(tmp_path, config(), SHAPES | {f"{TABLE}ngram_embedding.{name}": shape})
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)


def test_a_missing_tensor_of_a_model_without_ngrams(tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if ".ple." not in name}
    name = "lm_head.weight"
    check_missing(tmp_path, CLASS, config(ple_layer_ids=None), shapes, name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"output_gate_type": "silu"}, "'output_gate_type' is 'silu'; GGUF's qwen4exp implies"),
        ({"output_gate_type": None}, "'output_gate_type' is 'silu'; GGUF's qwen4exp implies"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is false"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"hidden_act": "gelu"}, "GGUF's qwen4exp implies silu"),
        ({"hc_count": 1}, "'hc_count' is 1"),
        ({"indexer_n_heads": None}, "'indexer_n_heads' is missing"),
        ({"indexer_kv_heads": 2}, "'indexer_kv_heads' is 2; GGUF's qwen4exp implies 1"),
        ({"indexer_budget": 6}, "indexer_budget 6 is not a multiple of indexer_compress_ratio 4"),
        ({"indexer_head_dim": 2}, "4 elements of heads are rotated, but indexer_head_dim is 2"),
        ({"ple_layer_ids": [1, 2]}, r"'ple_layer_ids' is \[1, 2\]; GGUF's qwen4exp has at most"),
        ({"ple_layer_ids": [3]}, "at most one such layer, from 1 to 2"),
        ({"ple_layer_ids": [2]}, "a layer with attention"),
        ({"ple_embed_dim": 30}, "ple_embed_dim 30 is not a multiple of 4 heads"),
        ({"ngram_size": 1}, "'ngram_size' is 1"),
        ({"eos_token_id": None}, "'eos_token_id' is missing"),
        ({"eos_token_id": []}, r"'eos_token_id' is \[\], expected tokens below 320"),
        ({"eos_token_id": 320}, "'eos_token_id' is 320"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'layer_types' does not have"),
        ({"num_hidden_layers": 1 << 30}, "'num_hidden_layers' is 1073741824"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, CLASS, config(**change), {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_the_first_token_that_ends_texts_counts(tmp_path):
    """As in transformers. llama.cpp's converter takes the last one."""
    write(tmp_path, CLASS, config(eos_token_id=[9, 7]), {})
    assert convert(tmp_path, vocab_only=True)[1]["qwen4exp.ple.eos_token_id"] == 9
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["eos_token_id"][1] == 7
