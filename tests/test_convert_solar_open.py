"""Solar Open: experts in every layer, from a checkpoint made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from iqforge.errors import ConfigError, UsageError
from iqforge.formats.tokenizer_hints import NFC_KEY

from .family_checkpoint import (
    EXPERTS,
    HEAD,
    HEADS,
    KV,
    KV_HEADS,
    VOCAB,
    D,
    Q,
    convert,
    split_as,
    write,
)
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

CLASS, WIDE, LAYERS = "SolarOpenForCausalLM", 20, 2
# As published: nothing about groups, and YaRN as transformers 4 spells it.
CONFIG = {
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "intermediate_size": 80,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}
for _layer in range(LAYERS):
    for _stored, _shape, _gguf in (
        ("input_layernorm.weight", (D,), "attn_norm.weight"),
        ("post_attention_layernorm.weight", (D,), "post_attention_norm.weight"),
        ("self_attn.q_proj.weight", (Q, D), "attn_q.weight"),
        ("self_attn.k_proj.weight", (KV, D), "attn_k.weight"),
        ("self_attn.v_proj.weight", (KV, D), "attn_v.weight"),
        ("self_attn.o_proj.weight", (D, Q), "attn_output.weight"),
        ("mlp.gate.weight", (EXPERTS, D), "ffn_gate_inp.weight"),
        ("mlp.gate.e_score_correction_bias", (EXPERTS,), "exp_probs_b.bias"),
        ("mlp.shared_experts.gate_proj.weight", (WIDE, D), "ffn_gate_shexp.weight"),
        ("mlp.shared_experts.up_proj.weight", (WIDE, D), "ffn_up_shexp.weight"),
        ("mlp.shared_experts.down_proj.weight", (D, WIDE), "ffn_down_shexp.weight"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}"] = (_shape, f"blk.{_layer}.{_gguf}")
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
STACKS = expert_stacks(
    "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", PARTS, range(LAYERS)
)
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "glm4moe") == {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": 80,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 32,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_gating_func": 2,
        "expert_feed_forward_length": WIDE,
        "leading_dense_block_count": 0,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }


def test_what_transformers_saves(tmp_path):
    """Groups, but no width of dense layers and nothing about how many are dense."""
    left_out = {"intermediate_size": None, "first_k_dense_replace": None}
    write(tmp_path, CLASS, CONFIG | left_out | {"n_group": 3, "topk_group": 2}, {})
    keys = keys_of(convert(tmp_path, vocab_only=True)[1], "glm4moe")
    assert keys["expert_group_count"] == 3 and keys["expert_group_used_count"] == 2
    assert keys["leading_dense_block_count"] == 0 and "feed_forward_length" not in keys


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


def test_dense_layers_are_refused(tmp_path):
    write(tmp_path, CLASS, CONFIG | {"first_k_dense_replace": 1}, {})
    with pytest.raises(ConfigError, match="'first_k_dense_replace' is 1; .* Solar Open implies 0"):
        convert(tmp_path, vocab_only=True)


def test_it_has_no_blocks_that_predict_further_tokens(tmp_path):
    write(tmp_path, CLASS, CONFIG, SHAPES)
    with pytest.raises(UsageError, match="no blocks that predict further tokens"):
        convert(tmp_path, mtp="only")


def with_special_tokens(folder: Path, settings: dict) -> dict:
    """Return the keys of a checkpoint whose tokenizer has Solar's tokens, and these settings."""
    write(folder, CLASS, CONFIG, {})
    split_as(folder, "solar-open")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) | {"post_processor": None}
    for number, text in ((317, "<unk>"), (318, "<|endoftext|>"), (319, "<|startoftext|>")):
        added = {"id": number, "content": text, "single_word": False, "lstrip": False}
        added |= {"rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return convert(folder, vocab_only=True)[1]


@pytest.mark.parametrize(
    "settings, bos, eos",
    [
        ({}, 319, 318),
        ({"bos_token": "<unk>"}, 317, 318),
        ({"bos_token": "<|startoftext|>", "eos_token": "<unk>"}, 319, 317),
    ],
)
def test_special_tokens_are_those_that_files_state_or_else_those_of_these_names(
    tmp_path, settings, bos, eos
):
    metadata = with_special_tokens(tmp_path, settings)
    names = ("bos", "eos", "eot", "unknown")
    found = [metadata[f"tokenizer.ggml.{key}_token_id"] for key in names]
    assert found == [bos, eos, 318, 317]
    assert metadata["tokenizer.ggml.pre"] == "solar-open"
    assert NFC_KEY not in metadata  # as that name implies


@pytest.mark.parametrize("factor", [1e308, 2, 0.01, 0, -1])
def test_a_part_of_heads_that_there_is_not_is_refused(tmp_path, factor):
    write(tmp_path, CLASS, CONFIG | {"partial_rotary_factor": factor}, {})
    with pytest.raises(ConfigError, match="'partial_rotary_factor' is"):
        convert(tmp_path, vocab_only=True)
