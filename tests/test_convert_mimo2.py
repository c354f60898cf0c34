"""MiMo-V2-Flash: a layer without and one with a window, from a checkpoint made here."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, f32, u32

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV_HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of
from .random_models import Models

CLASS, OF_EXPERT, VALUE, NEAR_HEADS = "MiMoV2FlashForCausalLM", 24, 8, 4
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": None,
    "layernorm_epsilon": 1e-5,
    "v_head_dim": VALUE,
    "moe_intermediate_size": OF_EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": [0, 1],
    "hybrid_layer_pattern": [0, 1],
    "swa_num_key_value_heads": NEAR_HEADS,
    "swa_num_attention_heads": HEADS,
    "swa_head_dim": HEAD,
    "swa_v_head_dim": VALUE,
    "swa_rope_theta": 5e3,
    "partial_rotary_factor": 0.5,
    "sliding_window": 16,
    "attention_value_scale": 0.5,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.1.self_attn.attention_sink_bias": ((HEADS,), "blk.1.attn_sinks.weight"),
    "model.layers.1.mlp.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
    "model.layers.1.mlp.gate.e_score_correction_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias"),
}
for _layer, _kv in enumerate((KV_HEADS, NEAR_HEADS)):
    for _name, _shape, _to in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (_kv * HEAD, D), "attn_k"),
        ("self_attn.v_proj", (_kv * VALUE, D), "attn_v"),
        ("self_attn.o_proj", (D, HEADS * VALUE), "attn_output"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
for _part, _shape in (("gate", (FF, D)), ("up", (FF, D)), ("down", (D, FF))):
    NAMES[f"model.layers.0.mlp.{_part}_proj.weight"] = _shape, f"blk.0.ffn_{_part}.weight"
PARTS = {"gate": (OF_EXPERT, D), "up": (OF_EXPERT, D), "down": (D, OF_EXPERT)}
STACKS = expert_stacks("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path, caplog):
    further = {"model.mtp.layers.0.self_attn.q_proj.weight": (Q, D)}
    stored = write(tmp_path, CLASS, CONFIG, SHAPES | further)
    made, metadata = convert(tmp_path)
    assert "blocks that predict further tokens are left out" in caplog.text
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "mimo2") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [KV_HEADS, NEAR_HEADS],
        "attention.key_length": HEAD,
        "attention.value_length": VALUE,
        "attention.value_scale": 0.5,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [0, 1],
        "rope.freq_base": 1e4,
        "rope.freq_base_swa": 5e3,
        "rope.dimension_count": HEAD // 2,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": OF_EXPERT,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swa_head_dim": 8}, "mimo2 implies 16"),
        ({"swa_v_head_dim": 16}, "mimo2 implies 8"),
        ({"swa_num_attention_heads": 8}, "mimo2 implies 4"),
        ({"n_shared_experts": 1}, "mimo2 implies 0"),
        ({"attention_bias": True}, "mimo2 implies false"),
        ({"norm_topk_prob": False}, "mimo2 implies true"),
        ({"scoring_func": "softmax"}, "mimo2 implies sigmoid"),
        ({"topk_method": "greedy"}, "mimo2 implies noaux_tc"),
        ({"hybrid_layer_pattern": [0, 2]}, "'hybrid_layer_pattern' must have 0 or 1"),
        ({"hybrid_layer_pattern": None, "layer_types": ["x", "y"]}, "'layer_types' must name"),
        ({"moe_layer_freq": [1, 0]}, "must come first"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_no_scale_of_values_and_none_said(tmp_path):
    """Null is none; a config without the key has that of the class."""
    key, without = "mimo2.attention.value_scale", dict(CONFIG)
    del without["attention_value_scale"]
    write(tmp_path, CLASS, without, {})
    assert convert(tmp_path, vocab_only=True)[1][key] == pytest.approx(0.707)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"attention_value_scale": null, ', 1))
    assert key not in convert(tmp_path, vocab_only=True)[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("mimo2"))


def test_a_file_with_blocks_that_predict_further_tokens_runs(models, tmp_path):
    """Such files of llama.cpp's converter have arrays for these blocks, too."""
    tiny, file = models.tiny("mimo2", "small"), models.file("mimo2", "small")
    with open_gguf(file) as source:
        found = {k.removeprefix("mimo2."): v.data for k, v in source.metadata.items()}
    n, keys = found["block_count"], {}
    for key, further in (
        ("attention.head_count_kv", 2),
        ("attention.sliding_window_pattern", 1),
        ("feed_forward_length", 24),
    ):
        layers = found[key] if isinstance(found[key], list) else [found[key]] * n
        keys[key] = array(ValueType.INT32, [*layers, further, further, further])
    keys |= {"block_count": u32(n + 3), "nextn_predict_layers": u32(3)}
    logits = models.changed_logits("mimo2", tmp_path / "x.gguf", keys)
    assert np.array_equal(logits, models.logits(file, tiny))


def test_the_base_of_layers_with_a_window_without_a_key(models, tmp_path):
    """As in llama.cpp, it is not that of the other layers."""
    key = "rope.freq_base_swa"
    without, default, other = (
        models.changed_logits("mimo2", tmp_path / f"{number}.gguf", {key: value})
        for number, value in enumerate((None, f32(10000.0), f32(50000.0)))
    )
    assert np.array_equal(without, default) and not np.array_equal(without, other)
