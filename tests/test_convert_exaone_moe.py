"""K-EXAONE: a dense layer, one with experts, and the block that predicts further tokens, from a
checkpoint made here.
"""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write

CLASS, OF_EXPERT = "ExaoneMoEForCausalLM", 24
NEAR, FAR = "sliding_attention", "full_attention"
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "is_moe_layer": [False, True],
    "layer_types": [NEAR, FAR],
    "sliding_window": 16,
    "sliding_window_pattern": "LLLG",
    "moe_intermediate_size": OF_EXPERT,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
# stored name -> (shape, GGUF name)
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.1.mlp.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
    "model.layers.1.mlp.e_score_correction_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias"),
    "mtp.fc.weight": ((D, 2 * D), "blk.2.nextn.eh_proj.weight"),
    "mtp.pre_fc_norm_embedding.weight": ((D,), "blk.2.nextn.enorm.weight"),
    "mtp.pre_fc_norm_hidden.weight": ((D,), "blk.2.nextn.hnorm.weight"),
    "mtp.norm.weight": ((D,), "blk.2.nextn.shared_head_norm.weight"),
}
for _layer, _stem in enumerate(("model.layers.0", "model.layers.1", "mtp.layers.0")):
    for _name, _shape, _to in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
    ):
        NAMES[f"{_stem}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
for _stem, _to, _ff in (
    ("model.layers.0.mlp.{}_proj", "0.ffn_{}", FF),
    ("mtp.layers.0.mlp.{}_proj", "2.ffn_{}", FF),
    ("model.layers.1.mlp.shared_experts.{}_proj", "1.ffn_{}_shexp", 2 * OF_EXPERT),
):
    for _part, _shape in (("gate", (_ff, D)), ("up", (_ff, D)), ("down", (D, _ff))):
        NAMES[f"{_stem.format(_part)}.weight"] = _shape, f"blk.{_to.format(_part)}.weight"
PARTS = {"gate": (OF_EXPERT, D), "up": (OF_EXPERT, D), "down": (D, OF_EXPERT)}
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
SHAPES = {name: shape for name, (shape, _) in NAMES.items()} | {
    EXPERT.format(x, part): shape for x in range(EXPERTS) for part, shape in PARTS.items()
}


@pytest.mark.parametrize("n", [2, 3])
def test_names_values_and_keys(tmp_path, n):
    """With the block that predicts further tokens, and without."""
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path, mtp="keep" if n == 3 else "drop")
    expected = {
        gguf: stored[name] for name, (_, gguf) in NAMES.items() if n == 3 or "mtp." not in name
    }
    for part in PARTS:
        experts = [stored[EXPERT.format(x, part)] for x in range(EXPERTS)]
        expected[f"blk.1.ffn_{part}_exps.weight"] = np.stack(experts)
    assert set(made) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name
    prefix = "exaone-moe."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    assert keys == {
        "block_count": n,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False],
        "rope.freq_base": 1e4,
        "rope.scaling.type": "none",
        "vocab_size": VOCAB,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": OF_EXPERT,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 2 * OF_EXPERT,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": n - 2,
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name or "mtp" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path)
    assert "is missing" in str(raised.value)
    assert NAMES[name][1].split(".")[1] in str(raised.value)  # the layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"layer_types": [NEAR]}, "'layer_types' must name"),
        ({"first_k_dense_replace": 0}, "0 by 'first_k_dense_replace' and 1 by 'is_moe_layer'"),
        ({"first_last_k_dense_replace": 2}, "2 by 'first_last_k_dense_replace'"),
        ({"is_moe_layer": [True, False]}, "'is_moe_layer' must say"),
        ({"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must say"),
        ({"mlp_layer_types": "dense"}, "'mlp_layer_types' must say"),
        ({"scoring_func": "softmax"}, "implies sigmoid"),
        ({"topk_method": "greedy"}, "implies noaux_tc"),
        ({"attention_bias": True}, "implies false"),
        ({"norm_topk_prob": None}, "'norm_topk_prob' is missing"),
        ({"topk_group": 2}, "'topk_group' is 2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_two_further_blocks_are_refused(tmp_path):
    second = {
        name.replace("layers.0", "layers.1"): shape
        for name, shape in SHAPES.items()
        if name.startswith("mtp.layers.0")
    }
    write(tmp_path, CLASS, CONFIG | {"num_nextn_predict_layers": 2}, SHAPES | second)
    with pytest.raises(ConfigError, match="'num_nextn_predict_layers' is 2"):
        convert(tmp_path)
