"""Conversion of Ling 2.0: layers with experts, and blocks that predict further tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import CheckpointError

from .family_checkpoint import HEAD, KV, VOCAB, D, Names, Q, convert, split_as, write
from .family_checks import Stacks, check_tensors, expert_stacks, shapes_of

N_EXPERTS, FF_EXPERT = 8, 12
CONFIG = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "num_experts": N_EXPERTS,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": FF_EXPERT,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "num_nextn_predict_layers": 1,
}
# stored name below a layer -> (shape, GGUF name below the layer)
LAYER = {
    "input_layernorm.weight": ((D,), "attn_norm.weight"),
    "attention.query_key_value.weight": ((Q + 2 * KV, D), "attn_qkv.weight"),
    "attention.query_layernorm.weight": ((HEAD,), "attn_q_norm.weight"),
    "attention.key_layernorm.weight": ((HEAD,), "attn_k_norm.weight"),
    "attention.dense.weight": ((D, Q), "attn_output.weight"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
    "mlp.gate.weight": ((N_EXPERTS, D), "ffn_gate_inp.weight"),
    "mlp.gate.expert_bias": ((N_EXPERTS,), "exp_probs_b.bias"),
    "mlp.shared_experts.gate_proj.weight": ((FF_EXPERT, D), "ffn_gate_shexp.weight"),
    "mlp.shared_experts.up_proj.weight": ((FF_EXPERT, D), "ffn_up_shexp.weight"),
    "mlp.shared_experts.down_proj.weight": ((D, FF_EXPERT), "ffn_down_shexp.weight"),
}
FURTHER = {
    "eh_proj.weight": ((D, 2 * D), "nextn.eh_proj.weight"),
    "enorm.weight": ((D,), "nextn.enorm.weight"),
    "hnorm.weight": ((D,), "nextn.hnorm.weight"),
    "final_layernorm.weight": ((D,), "layer_output_norm.weight"),
}
PARTS = {"gate": (FF_EXPERT, D), "up": (FF_EXPERT, D), "down": (D, FF_EXPERT)}
OUTSIDE = {
    "model.word_embeddings.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}


def names(n_layers: int, further: int) -> Names:
    """{whole stored name: (shape, whole GGUF name)} of what is stored alone."""
    found = dict(OUTSIDE)
    for layer in range(n_layers + further):
        own = LAYER | (FURTHER if layer >= n_layers else {})
        found |= {
            f"model.layers.{layer}.{name}": (shape, f"blk.{layer}.{gguf}")
            for name, (shape, gguf) in own.items()
        }
    return found


def stacks(layers: int) -> Stacks:
    stored = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    return expert_stacks(stored, PARTS, range(layers), n_experts=N_EXPERTS)


def write_model(folder: Path, further: int, **config) -> dict[str, np.ndarray]:
    shapes = shapes_of(names(2, further), stacks(2 + further))
    return write(folder, "BailingMoeV2ForCausalLM", CONFIG | config, shapes)


@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_layers_with_experts_and_a_further_block(tmp_path: Path, mtp: str):
    stored = write_model(tmp_path, 1)
    made, metadata = convert(tmp_path, mtp=mtp)
    kept = 1 if mtp == "keep" else 0
    check_tensors(
        made,
        stored,
        {
            name: (shape, gguf)
            for name, (shape, gguf) in names(2, 1).items()
            if kept or not gguf.startswith("blk.2.")
        },
        stacks(2 + kept),
    )
    assert metadata["bailingmoe2.block_count"] == 2 + kept
    assert metadata.get("bailingmoe2.nextn_predict_layers", 0) == kept
    assert metadata["bailingmoe2.expert_shared_feed_forward_length"] == FF_EXPERT


def test_a_number_of_further_blocks_that_is_0_is_written(tmp_path: Path):
    write_model(tmp_path, 0, num_nextn_predict_layers=0)
    _, metadata = convert(tmp_path)
    assert metadata["bailingmoe2.nextn_predict_layers"] == 0
    write_model(tmp_path, 0, num_nextn_predict_layers=None)
    _, metadata = convert(tmp_path)
    assert "bailingmoe2.nextn_predict_layers" not in metadata


def test_a_model_without_choice_biases_says_so(tmp_path: Path):
    stored = write_model(tmp_path, 0, num_nextn_predict_layers=0)
    without = {name: x.shape for name, x in stored.items() if not name.endswith("expert_bias")}
    for biased in (True, False):
        config = CONFIG | {"num_nextn_predict_layers": 0, "moe_router_enable_expert_bias": biased}
        write(tmp_path, "BailingMoeV2ForCausalLM", config, without)
        if biased:
            with pytest.raises(CheckpointError, match=r"mlp\.gate\.expert_bias': is missing"):
                convert(tmp_path)
        else:
            assert "blk.0.exp_probs_b.bias" not in convert(tmp_path)[0]


def test_the_pre_tokenizer_has_the_name_of_this_generation(tmp_path: Path):
    """Ling 1.5's splits by the same regex, and has another name."""
    write_model(tmp_path, 0, num_nextn_predict_layers=0)
    split_as(tmp_path, "bailingmoe")
    for pre, name in ((None, "bailingmoe2"), ("bailingmoe", "bailingmoe"), ("qwen2", "qwen2")):
        assert convert(tmp_path, pre=pre)[1]["tokenizer.ggml.pre"] == name
