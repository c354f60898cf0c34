"""Cohere's models with experts: a dense layer, one with experts, and a block that predicts further
tokens, from a checkpoint made here.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge.errors import ArchitectureError, CheckpointError, ConfigError

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
from .tiny_checkpoint import write_safetensors

CLASS, WIDE, DENSE = "Cohere2MoeForCausalLM", 20, 56
NEAR, FAR = "sliding_attention", "full_attention"
CONFIG = {  # as published with North Mini Code, but for the shared experts
    "num_hidden_layers": 2,
    "tie_word_embeddings": None,
    "attention_bias": False,
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "intermediate_size": WIDE,
    "layer_norm_eps": 1e-4,
    "layer_types": [FAR, NEAR],
    "logit_scale": 0.5,
    "norm_topk_prob": False,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "position_embedding_type": "rope_gptj",
    "prefix_dense_intermediate_size": DENSE,
    "prefix_dense_sliding_window_pattern": 1,
    "rotary_pct": 1.0,
    "shared_expert_combination_strategy": "average",
    "sliding_window": 8,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
}
FURTHER = {
    "model.layers.2.eh_proj.weight": ((D, 2 * D), "blk.2.nextn.eh_proj.weight"),
    "model.layers.2.enorm.weight": ((D,), "blk.2.nextn.enorm.weight"),
    "model.layers.2.hnorm.weight": ((D,), "blk.2.nextn.hnorm.weight"),
}
for _layer in range(3):
    _names = FURTHER if _layer == 2 else NAMES
    for _stored, _shape, _gguf in (
        ("input_layernorm", (D,), "attn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        *([("mlp.gate", (EXPERTS, D), "ffn_gate_inp")] if _layer else []),
    ):
        _names[f"model.layers.{_layer}.{_stored}.weight"] = _shape, f"blk.{_layer}.{_gguf}.weight"
    _stem, _suffix, _ff = (
        ("mlp.shared_experts", "_shexp", 2 * WIDE) if _layer else ("mlp", "", DENSE)
    )
    for _part, _shape in (("gate", (_ff, D)), ("up", (_ff, D)), ("down", (D, _ff))):
        _names[f"model.layers.{_layer}.{_stem}.{_part}_proj.weight"] = (
            _shape,
            f"blk.{_layer}.ffn_{_part}{_suffix}.weight",
        )
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
STACKS = expert_stacks(EXPERT, PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)
KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": D,
    "feed_forward_length": DENSE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    "attention.layer_norm_epsilon": pytest.approx(1e-4),
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [False, True],
    "rope.freq_base": 1e4,
    "rope.dimension_count": HEAD,
    "rope.scaling.type": "none",
    "vocab_size": VOCAB,
    "logit_scale": 0.5,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDE,
    "expert_shared_count": 2,
    "expert_shared_feed_forward_length": 2 * WIDE,
    "expert_gating_func": 2,
    "expert_weights_norm": False,
    "leading_dense_block_count": 1,
}


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "cohere2moe") == KEYS


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_a_block_that_predicts_further_tokens(tmp_path, mtp):
    names, stacks = NAMES | FURTHER, expert_stacks(EXPERT, PARTS, [1, 2])
    config = CONFIG | {"num_nextn_predict_layers": 1}
    stored = write(tmp_path, CLASS, config, shapes_of(names, stacks))
    made, metadata = convert(tmp_path, mtp=mtp)
    if mtp == "drop":
        check_tensors(made, stored, NAMES, STACKS)
        assert keys_of(metadata, "cohere2moe") == KEYS
        return
    check_tensors(made, stored, names, stacks)
    further = {"block_count": 3, "nextn_predict_layers": 1}
    assert keys_of(metadata, "cohere2moe") == KEYS | further


def test_the_text_model_of_command_a_plus(tmp_path):
    """LayerNorms, no dense layer, scores with a sum of 1; its tensors lie next to those of a vision
    tower.
    """
    of_text = CONFIG | {
        "first_k_dense_replace": 0,
        "layer_types": [NEAR, FAR],
        "norm_topk_prob": True,
        "prefix_dense_intermediate_size": None,
        "rms_norm_eps": None,
    }
    names = {
        name: (shape, gguf)
        for name, (shape, gguf) in NAMES.items()
        if "layers.1" in name or "layers" not in name
    }
    names |= {
        name.replace("layers.1", "layers.0"): (shape, gguf.replace("blk.1", "blk.0"))
        for name, (shape, gguf) in names.items()
    }
    stacks = expert_stacks(EXPERT, PARTS, [0, 1])
    stored = write(tmp_path, CLASS, of_text, shapes_of(names, stacks))
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "cohere2_moe"}
    outer = {
        "architectures": ["Cohere2VisionForConditionalGeneration"],
        "model_type": "cohere2_vision",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    nested = {name.replace("model.", "model.language_model.", 1): x for name, x in stored.items()}
    nested["model.vision_tower.embeddings.weight"] = np.zeros((2, 2), np.float32)
    nested["model.multi_modal_projector.linear_1.weight"] = np.zeros((2, 2), np.float32)
    write_safetensors(tmp_path / "model.safetensors", nested)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, stacks)
    wanted = KEYS | {
        "attention.sliding_window_pattern": [True, False],
        "expert_weights_norm": True,
        "feed_forward_length": WIDE,
        "leading_dense_block_count": 0,
    }
    del wanted["attention.layer_norm_rms_epsilon"]
    assert keys_of(metadata, "cohere2moe") == wanted
    outer["text_config"] = text | {"model_type": "cohere2"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ArchitectureError, match="text model 'cohere2' of 'Cohere2Vision"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("first", "before", "period", "expected"),
    [
        (1, 1, 4, [False, True, True, True, False, True, True]),
        (0, 1, None, [True, True, True, False, True, True, True]),
        (3, 2, 3, [True, False, True, True, True, False, True]),
    ],
)
def test_layers_with_a_window_by_their_periods(tmp_path, first, before, period, expected):
    change = {
        "num_hidden_layers": 7,
        "layer_types": None,
        "first_k_dense_replace": first,
        "prefix_dense_sliding_window_pattern": before,
        "sliding_window_pattern": period,
    }
    write(tmp_path, CLASS, CONFIG | change, {})
    if before != 1:  # of which the dense layer 1 has none
        with pytest.raises(ConfigError, match="'prefix_dense_sliding_window_pattern' is not 1"):
            convert(tmp_path, vocab_only=True)
        return
    keys = keys_of(convert(tmp_path, vocab_only=True)[1], "cohere2moe")
    assert keys["attention.sliding_window_pattern"] == expected
    assert keys["leading_dense_block_count"] == first


def test_what_the_config_leaves_out(tmp_path):
    """Defaults of the class. Weights of a softmax have a sum of 1 whatever the config says."""
    left_out = (
        *("expert_selection_fn", "logit_scale", "num_experts", "num_experts_per_tok", "head_dim"),
        *("num_shared_experts", "sliding_window", "num_key_value_heads", "first_k_dense_replace"),
    )
    write(tmp_path, CLASS, CONFIG | dict.fromkeys(left_out), {})
    keys = keys_of(convert(tmp_path, vocab_only=True)[1], "cohere2moe")
    assert keys["attention.key_length"] == 128 and keys["attention.head_count_kv"] == HEADS
    assert (keys["expert_count"], keys["expert_used_count"]) == (8, 2)
    assert keys["expert_gating_func"] == 1 and keys["expert_weights_norm"] is True
    assert keys["logit_scale"] == 0.0625 and keys["attention.sliding_window"] == 4096
    assert keys["leading_dense_block_count"] == 0
    assert "expert_shared_count" not in keys and "expert_shared_feed_forward_length" not in keys


def test_an_output_matrix_of_its_own(tmp_path):
    names = NAMES | {"lm_head.weight": ((VOCAB, D), "output.weight")}
    config = CONFIG | {"tie_word_embeddings": False}
    stored = write(tmp_path, CLASS, config, shapes_of(names, STACKS))
    check_tensors(convert(tmp_path)[0], stored, names, STACKS)
    check_missing(tmp_path, CLASS, config, shapes_of(names, STACKS), "lm_head.weight")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


def test_a_missing_expert_is_named(tmp_path):
    name = EXPERT.format(layer=1, expert=2, part="gate")
    words = "layer 1 lacks experts: expert 2 has no gate"
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, words)


@pytest.mark.parametrize(("value", "words"), [(0.0, ""), (0.5, "is not zero; .* biases")])
def test_biases_of_zeros_are_left_out(tmp_path, value, words):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    biases = {"model.layers.1.self_attn.q_proj.bias": np.full(Q, value, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored | biases)
    if words:
        with pytest.raises(CheckpointError, match=f"q_proj.bias': {words}"):
            convert(tmp_path)
    else:
        check_tensors(convert(tmp_path)[0], stored, NAMES, STACKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [NEAR]}, "'layer_types' must name"),
        ({"layer_types": [NEAR, "chunked_attention"]}, "'layer_types' must name"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "'mlp_layer_types' must say"),
        ({"mlp_layer_types": ["sparse", "sparse"]}, "1 by 'first_k_dense_replace' and 0"),
        ({"expert_selection_fn": "sparsemax"}, "'expert_selection_fn' is 'sparsemax'"),
        ({"shared_expert_combination_strategy": "sum"}, "strategy' is 'sum'.* implies average"),
        ({"position_embedding_type": "rope"}, "implies rope_gptj"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"use_qk_norm": True}, "'use_qk_norm' is true"),
        ({"use_parallel_block": False}, "'use_parallel_block' is false"),
        ({"rotary_pct": 0.5}, "'rotary_pct' is 0.5"),
        ({"num_experts_per_tok": 4}, "'num_experts_per_tok' is 4"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_no_window_is_refused(tmp_path):
    write(tmp_path, CLASS, CONFIG, SHAPES)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": None}))
    with pytest.raises(ConfigError, match="'sliding_window' is null"):
        convert(tmp_path)


def test_the_pre_tokenizer_has_a_name_of_its_own(tmp_path):
    write(tmp_path, CLASS, CONFIG, {})
    split_as(tmp_path, "tiny_aya")
    assert convert(tmp_path, vocab_only=True)[1]["tokenizer.ggml.pre"] == "cohere2moe"
