"""DeepSeekMoE: a dense layer and one with experts, from a checkpoint made here."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import EXPERTS, FF, HEADS, KV_HEADS, VOCAB, D, convert, write

CLASS, OF_EXPERT, SIZE = "DeepseekForCausalLM", 24, D // HEADS
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": None,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": OF_EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
# stored name -> (shape, GGUF name)
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.1.mlp.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
}
for _layer in range(2):
    for _name, _shape, _to in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (D, D), "attn_q"),
        ("self_attn.k_proj", (KV_HEADS * SIZE, D), "attn_k"),
        ("self_attn.v_proj", (KV_HEADS * SIZE, D), "attn_v"),
        ("self_attn.o_proj", (D, D), "attn_output"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
for _stem, _to, _ff in (
    ("0.mlp.{}_proj", "0.ffn_{}", FF),
    ("1.mlp.shared_experts.{}_proj", "1.ffn_{}_shexp", 2 * OF_EXPERT),
):
    for _part, _shape in (("gate", (_ff, D)), ("up", (_ff, D)), ("down", (D, _ff))):
        _name, _gguf = (x.format(_part) for x in (_stem, _to))
        NAMES[f"model.layers.{_name}.weight"] = _shape, f"blk.{_gguf}.weight"
PARTS = {"gate": (OF_EXPERT, D), "up": (OF_EXPERT, D), "down": (D, OF_EXPERT)}
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"
SHAPES = {name: shape for name, (shape, _) in NAMES.items()} | {
    EXPERT.format(x, part): shape for x in range(EXPERTS) for part, shape in PARTS.items()
}


def paired(rows: np.ndarray) -> np.ndarray:
    """Return the rows of heads with rotary partners side by side."""
    halves = rows.reshape(-1, 2, SIZE // 2, D)
    return halves.transpose(0, 2, 1, 3).reshape(rows.shape)


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    expected = {
        gguf: paired(stored[name]) if name.endswith(("q_proj.weight", "k_proj.weight")) else values
        for name, (_, gguf) in NAMES.items()
        for values in (stored[name],)
    }
    for part in PARTS:
        experts = [stored[EXPERT.format(x, part)] for x in range(EXPERTS)]
        expected[f"blk.1.ffn_{part}_exps.weight"] = np.stack(experts)
    assert set(made) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name
    prefix = "deepseek."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    assert keys == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": SIZE,
        "rope.scaling.type": "none",
        "vocab_size": VOCAB,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": OF_EXPERT,
        "expert_shared_count": 2,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.0,
        "leading_dense_block_count": 1,
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path)
    assert f"'{name}': is missing" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ({"norm_topk_prob": True}, "'norm_topk_prob' is true"),
        ({"scoring_func": "sigmoid"}, "implies softmax"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"first_k_dense_replace": 3}, "'first_k_dense_replace' is 3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"num_experts_per_tok": 4}, "'num_experts_per_tok' is 4"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)
