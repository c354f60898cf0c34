"""Granite with experts, and Granite 4 with and without Mamba, from checkpoints made here."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import (
    EMBEDDING,
    EXPERTS,
    FF,
    HEAD,
    KV,
    LAYER,
    D,
    Q,
    convert,
    split_as,
    write,
)
from .family_checks import check_missing, keys_of, shapes_of
from .tiny_cases_granite import FACTORS

SHARED = 20  # hidden size of the expert that works on every token
CONFIG = FACTORS | {
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": SHARED,
}
GRANITE4 = CONFIG | {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"],
    "position_embedding_type": "rope",
}
MOE, SHARED_MLP = f"{LAYER}block_sparse_moe.", f"{LAYER}shared_mlp."
# stored name -> (shape, GGUF name)
COMMON = {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()} | {
    f"{LAYER}input_layernorm.weight": ((D,), "blk.0.attn_norm.weight"),
    f"{LAYER}post_attention_layernorm.weight": ((D,), "blk.0.ffn_norm.weight"),
    f"{LAYER}self_attn.v_proj.weight": ((KV, D), "blk.0.attn_v.weight"),
    f"{LAYER}self_attn.o_proj.weight": ((D, Q), "blk.0.attn_output.weight"),
}
PAIRED = {
    f"{LAYER}self_attn.q_proj.weight": ((Q, D), "blk.0.attn_q.weight"),
    f"{LAYER}self_attn.k_proj.weight": ((KV, D), "blk.0.attn_k.weight"),
}
ROUTED = {
    f"{MOE}router.layer.weight": ((EXPERTS, D), "blk.0.ffn_gate_inp.weight"),
    f"{MOE}output_linear.weight": ((EXPERTS, D, FF), "blk.0.ffn_down_exps.weight"),
}
EXPERT_INPUTS = f"{MOE}input_linear.weight"
SHARED_INPUTS, SHARED_OUTPUT = (f"{SHARED_MLP}{part}_linear.weight" for part in ("input", "output"))
SHAPES = shapes_of(COMMON | PAIRED | ROUTED) | {
    EXPERT_INPUTS: (EXPERTS, 2 * FF, D),
    SHARED_INPUTS: (2 * SHARED, D),
    SHARED_OUTPUT: (D, SHARED),
}


def expected(stored: dict[str, np.ndarray], shared: str) -> dict[str, np.ndarray]:
    """Return {GGUF name: values}. shared: what follows the names of the matrices for all tokens."""
    found = {}
    for name, values in stored.items():
        if name in PAIRED:
            halves = values.reshape(-1, 2, HEAD // 2, D)
            found[PAIRED[name][1]] = halves.swapaxes(1, 2).reshape(values.shape)
        elif name == EXPERT_INPUTS:
            found["blk.0.ffn_gate_exps.weight"] = values[:, :FF]
            found["blk.0.ffn_up_exps.weight"] = values[:, FF:]
        elif name == SHARED_INPUTS:
            found[f"blk.0.ffn_gate{shared}.weight"] = values[:SHARED]
            found[f"blk.0.ffn_up{shared}.weight"] = values[SHARED:]
        elif name == SHARED_OUTPUT:
            found[f"blk.0.ffn_down{shared}.weight"] = values
        else:
            found[(COMMON | ROUTED)[name][1]] = values
    return found


@pytest.mark.parametrize("hf_class", ["GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_experts_and_a_shared_one(tmp_path, hf_class):
    more = GRANITE4 if "Hybrid" in hf_class else {}
    stored = write(tmp_path, hf_class, more | CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    wanted = expected(stored, "_shexp")
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[name], wanted[name]) for name in wanted)
    keys = {
        "general.architecture": "granitemoe",
        "granitemoe.feed_forward_length": FF,
        "granitemoe.expert_count": EXPERTS,
        "granitemoe.expert_used_count": 2,
        "granitemoe.expert_shared_feed_forward_length": SHARED,
        "granitemoe.attention.key_length": HEAD,
        "granitemoe.attention.scale": pytest.approx(FACTORS["attention_multiplier"]),
        "granitemoe.embedding_scale": FACTORS["embedding_multiplier"],
        "granitemoe.residual_scale": pytest.approx(FACTORS["residual_multiplier"]),
        "granitemoe.logit_scale": FACTORS["logits_scaling"],
    }
    assert {key: metadata[key] for key in keys} == keys


def test_experts_alone(tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if SHARED_MLP not in name}
    config = CONFIG | {"shared_intermediate_size": None}
    stored = write(tmp_path, "GraniteMoeForCausalLM", config, shapes)
    made, metadata = convert(tmp_path, merge_gate_up=True)
    assert np.array_equal(made["blk.0.ffn_gate_up_exps.weight"], stored[EXPERT_INPUTS])
    assert "granitemoe.expert_shared_feed_forward_length" not in metadata
    assert not any("shexp" in name for name in made)


@pytest.mark.parametrize("positions", ["rope", None])
def test_granite_4_without_experts_is_granite(tmp_path, positions):
    shapes = {name: shape for name, shape in SHAPES.items() if MOE not in name}
    config = GRANITE4 | {"position_embedding_type": positions}
    stored = write(tmp_path, "GraniteMoeHybridForCausalLM", config, shapes)
    made, metadata = convert(tmp_path)
    wanted = expected(stored, "")
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[name], wanted[name]) for name in wanted)
    assert metadata["general.architecture"] == "granite"
    assert metadata["granite.feed_forward_length"] == SHARED
    assert metadata["granite.rope.scaling.finetuned"] is (positions == "rope")
    assert not any("expert" in key for key in metadata)


HEADS_OF_MAMBA, HEAD_OF_MAMBA, STATE = 4, 16, 10
INNER = 2 * D
MAMBA = {
    "mamba_n_heads": HEADS_OF_MAMBA,
    "mamba_d_head": "auto",
    "mamba_d_state": STATE,
    "mamba_n_groups": 2,
    "num_hidden_layers": 2,
    "layer_types": ["attention", "mamba"],
    "position_embedding_type": "nope",
}
CHANNELS = INNER + 2 * 2 * STATE
OF_MAMBA = {
    "in_proj.weight": ((INNER + CHANNELS + HEADS_OF_MAMBA, D), "ssm_in.weight"),
    "conv1d.weight": ((CHANNELS, 1, 4), "ssm_conv1d.weight"),
    "conv1d.bias": ((CHANNELS,), "ssm_conv1d.bias"),
    "dt_bias": ((HEADS_OF_MAMBA,), "ssm_dt.bias"),
    "A_log": ((HEADS_OF_MAMBA,), "ssm_a"),
    "D": ((HEADS_OF_MAMBA,), "ssm_d"),
    "norm.weight": ((INNER,), "ssm_norm.weight"),
    "out_proj.weight": ((D, INNER), "ssm_out.weight"),
}


@pytest.mark.parametrize("routed", [True, False])
def test_granite_4_with_mamba_is_granitehybrid(tmp_path, routed):
    second = "model.layers.1."
    shapes = {name: shape for name, shape in SHAPES.items() if routed or MOE not in name}
    shapes |= {
        name.replace(LAYER, second): shape
        for name, shape in shapes.items()
        if name.startswith(LAYER) and "self_attn" not in name
    }
    shapes |= {f"{second}mamba.{name}": shape for name, (shape, _) in OF_MAMBA.items()}
    config = (CONFIG if routed else GRANITE4) | MAMBA
    stored = write(tmp_path, "GraniteMoeHybridForCausalLM", config, shapes)
    made, metadata = convert(tmp_path)
    assert {name for name in made if name.startswith("blk.1.ssm")} == {
        f"blk.1.{gguf}" for _, gguf in OF_MAMBA.values()
    }
    assert not any(name.startswith(("blk.0.ssm", "blk.1.attn_q")) for name in made)
    for name, (_, gguf) in OF_MAMBA.items():
        values, found = stored[f"{second}mamba.{name}"], made[f"blk.1.{gguf}"]
        if name == "A_log":
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        assert np.array_equal(found.ravel(), values.ravel()), name
    assert made["blk.1.ssm_norm.weight"].shape == (2, INNER // 2)
    assert made["blk.1.ssm_a"].shape == made["blk.1.ssm_d"].shape == (HEADS_OF_MAMBA, 1)
    keys = keys_of(metadata, "granitehybrid")
    assert keys["attention.head_count_kv"] == [2, 0]
    assert keys["context_length"] == 1 << 20
    assert keys["feed_forward_length"] == (FF if routed else SHARED)
    assert keys["rope.scaling.finetuned"] is False
    of_mamba = {k: v for k, v in keys.items() if k.startswith("ssm.")}
    sizes = {"conv_kernel": 4, "state_size": STATE, "group_count": 2, "inner_size": INNER}
    sizes |= {"time_step_rank": HEADS_OF_MAMBA}
    assert of_mamba == {f"ssm.{key}": value for key, value in sizes.items()}


def test_mamba_and_rotation_have_keys(tmp_path):
    config = GRANITE4 | MAMBA | {"position_embedding_type": "rope"}
    write(tmp_path, "GraniteMoeHybridForCausalLM", config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["granitehybrid.rope.scaling.finetuned"] is True
    assert metadata["granitehybrid.context_length"] == 64


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(tmp_path, name):
    routed = {EXPERT_INPUTS: "no gate projection|expert 0 has no gate"}
    routed[f"{MOE}output_linear.weight"] = "layer 0 lacks experts: expert 0 has no"
    check_missing(tmp_path, "GraniteMoeSharedForCausalLM", CONFIG, SHAPES, name, routed.get(name))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layer_types": ["x"]}, "'x' for layer 0, expected attention, full_attention, mamba"),
        ({"layer_types": ["mamba"] * 2}, "has 2 items for 1 layers"),
        (MAMBA | {"mamba_d_head": 15}, "4 heads of Mamba layers with 15 elements are not 64"),
        (MAMBA | {"mamba_proj_bias": True}, "'mamba_proj_bias' is true"),
        ({"shared_intermediate_size": 0}, "layers have no feed-forward"),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": None},
            "granitemoe implies rope",
        ),
        ({"residual_multiplier": 0.0}, "'residual_multiplier' is 0.0, expected a positive"),
        ({"hidden_act": "gelu"}, "GGUF's granite implies silu"),
        (MAMBA | {"hidden_act": "gelu"}, "GGUF's granitehybrid implies silu"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, "GraniteMoeHybridForCausalLM", GRANITE4 | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_defaults_of_the_class(tmp_path):
    """What a config leaves out counts as 1, and has a key: without it runtimes divide scores by the
    root of the head size.
    """
    write(tmp_path, "GraniteForCausalLM", {"head_dim": None}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
        assert metadata[f"granite.{key}"] == 1
    assert "granite.attention.key_length" not in metadata
    assert metadata["granite.rope.dimension_count"] == D // 4


@pytest.mark.parametrize("name, like", [("refact", "starcoder"), ("dbrx", "glm4")])
def test_pre_tokenizers_have_the_names_that_files_of_the_family_have(tmp_path, name, like):
    """Of several that split alike."""
    write(tmp_path, "GraniteForCausalLM", {}, {})
    split_as(tmp_path, name)
    for pre, expected in ((None, name), (like, like)):
        _, metadata = convert(tmp_path, pre=pre, vocab_only=True)
        assert metadata["tokenizer.ggml.pre"] == expected
