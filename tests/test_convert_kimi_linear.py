"""Kimi Linear from checkpoints made here, as it is published and as transformers saves it."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import EMBEDDING, FF, HEADS, VOCAB, D, convert, write
from .family_checks import check_missing, dense_rows, expert_stacks, keys_of, shapes_of

SIZE, RANK, NOPE, ROT, VALUE, EXPERTS, EXPERT = 8, 24, 12, 4, 16, 3, 20
INNER = HEADS * SIZE
CONFIG = {
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "head_dim": 72,  # of no head
    "num_key_value_heads": HEADS,
    "max_position_embeddings": None,
    "model_max_length": 96,
    "first_k_dense_replace": 1,
    "kv_lora_rank": RANK,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROT,
    "v_head_dim": VALUE,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": SIZE,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": EXPERT,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
NORMS = {
    "input_layernorm.weight": ((D,), "attn_norm.weight"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
}
LINEAR = {
    **{f"self_attn.{x}_proj.weight": ((INNER, D), f"attn_{x}.weight") for x in "qkv"},
    **{f"self_attn.{x}_conv1d.weight": ((INNER, 1, 4), f"ssm_conv1d_{x}.weight") for x in "qkv"},
    **{f"self_attn.{x}_a_proj.weight": ((SIZE, D), f"ssm_{x}_a.weight") for x in "fg"},
    **{f"self_attn.{x}_b_proj.weight": ((INNER, SIZE), f"ssm_{x}_b.weight") for x in "fg"},
    "self_attn.b_proj.weight": ((HEADS, D), "ssm_beta.weight"),
    "self_attn.A_log": ((1, 1, HEADS, 1), "ssm_a"),
    "self_attn.dt_bias": ((INNER,), "ssm_dt.bias"),
    "self_attn.o_norm.weight": ((SIZE,), "ssm_norm.weight"),
    "self_attn.o_proj.weight": ((D, INNER), "attn_output.weight"),
}
KV_B = "self_attn.kv_b_proj.weight"
LATENT = {
    "self_attn.q_proj.weight": ((HEADS * (NOPE + ROT), D), "attn_q.weight"),
    "self_attn.kv_a_proj_with_mqa.weight": ((RANK + ROT, D), "attn_kv_a_mqa.weight"),
    "self_attn.kv_a_layernorm.weight": ((RANK,), "attn_kv_a_norm.weight"),
    KV_B: ((HEADS * (NOPE + VALUE), RANK), ""),
    "self_attn.o_proj.weight": ((D, HEADS * VALUE), "attn_output.weight"),
}
DENSE = dense_rows(D, FF, "")
SPARSE = {
    "gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "gate.e_score_correction_bias": ((EXPERTS,), "exp_probs_b.bias"),
    **dense_rows(D, EXPERT, "shared_experts.", "_shexp"),
}
STACKS = expert_stacks(
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
    {"gate": (EXPERT, D), "down": (D, EXPERT), "up": (EXPERT, D)},
    (1, 2),
    {"gate": "w1", "down": "w2", "up": "w3"},
    EXPERTS,
)


def table(dense: str = "mlp") -> dict[str, tuple[tuple[int, ...], str]]:
    """Return stored name -> shape, GGUF name, of what is not computed. dense: as the feed-forward
    of the first layer is called.
    """
    found = {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()}
    found["lm_head.weight"] = (VOCAB, D), "output.weight"
    of_layers = [
        NORMS | LINEAR | {f"{dense}.{name}": row for name, row in DENSE.items()},
        NORMS | LATENT | {f"block_sparse_moe.{name}": row for name, row in SPARSE.items()},
        NORMS | LINEAR | {f"block_sparse_moe.{name}": row for name, row in SPARSE.items()},
    ]
    for layer, rows in enumerate(of_layers):
        for name, (shape, gguf) in rows.items():
            found[f"model.layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return found


SHAPES = shapes_of(table(), STACKS)
HF_CLASS = "KimiLinearForCausalLM"


def check(made: dict[str, np.ndarray], stored: dict[str, np.ndarray], rows: dict) -> None:
    wanted = {}
    for name, (_, gguf) in rows.items():
        values = stored[name]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        if name.endswith("conv1d.weight"):
            assert made[gguf].shape == (1, INNER, 1, 4)
        if name.endswith(KV_B):
            k, v = np.split(values.reshape(HEADS, NOPE + VALUE, RANK), [NOPE], axis=1)
            wanted["blk.1.attn_k_b.weight"] = k.swapaxes(1, 2)
            wanted["blk.1.attn_v_b.weight"] = v
        else:
            wanted[gguf] = values
    for gguf, experts in STACKS.items():
        wanted[gguf] = np.stack([stored[name] for name in experts])
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name].ravel(), values.ravel()), name


# transformers renames the feed-forward of dense layers, too, when it saves a model.
@pytest.mark.parametrize("dense", ["mlp", "block_sparse_moe"])
def test_tensors_and_keys(tmp_path, dense):
    rows = table(dense)
    stored = write(tmp_path, HF_CLASS, CONFIG, shapes_of(rows, STACKS))
    made, metadata = convert(tmp_path)
    check(made, stored, rows)
    assert made["blk.0.ssm_a"].shape == (1, 1, HEADS, 1)
    assert keys_of(metadata, "kimi-linear") == {
        "block_count": 3,
        "context_length": 96,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, 1, 0],
        "attention.key_length": RANK + ROT,
        "attention.value_length": 72,
        "attention.key_length_mla": NOPE + ROT,
        "attention.value_length_mla": VALUE,
        "attention.kv_lora_rank": RANK,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": ROT,
        "ssm.conv_kernel": 4,
        "kda.head_dim": SIZE,
        "leading_dense_block_count": 1,
        "vocab_size": VOCAB,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": EXPERT,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
    }


def test_convolutions_may_have_two_dimensions(tmp_path):
    shapes = {
        name: (INNER, 4) if name.endswith("conv1d.weight") else shape
        for name, shape in SHAPES.items()
    }
    stored = write(tmp_path, HF_CLASS, CONFIG, shapes)
    check(convert(tmp_path)[0], stored, table())


@pytest.mark.parametrize("name", [name for name in SHAPES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    words = f"'{name.replace('block_sparse_moe', 'mlp')}': is missing"
    check_missing(tmp_path, HF_CLASS, CONFIG, SHAPES, name, words)


def kda(**changes) -> dict:
    return {"linear_attn_config": CONFIG["linear_attn_config"] | changes}


@pytest.mark.parametrize(
    "change, words",
    [
        (kda(full_attn_layers=[1, 2]), "do not name each of 3 layers once"),
        (kda(kda_layers=[1]), "do not name each of 3 layers once"),
        (kda(kda_layers=[0, 1]), "do not name each of 3 layers once"),
        ({"num_hidden_layers": 1 << 30}, "'num_hidden_layers' is 1073741824"),
        (kda(num_heads=3), "linear attention have 3 heads, and others 4"),
        (kda(short_conv_kernel_size=1), "'linear_conv_kernel_dim' is 1"),
        ({"linear_attn_config": None, "layer_types": ["full_attention", "x", "x"]}, "one of them"),
        ({"linear_attn_config": None}, "'layer_types' has 0 items; expected 3 times"),
        ({"mla_use_nope": False}, "'mla_use_nope' is false"),
        ({"moe_renormalize": False}, "'moe_renormalize' is false"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is 'softmax'"),
        ({"num_expert_group": 3}, "one group of experts"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is not 1"),
        ({"hidden_act": "gelu"}, "GGUF's kimi-linear implies silu"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, HF_CLASS, CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_kinds_of_layers_as_transformers_saves_them(tmp_path):
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {"linear_head_dim": SIZE, "linear_num_heads": HEADS, "linear_conv_kernel_dim": 4}
    config = CONFIG | {"linear_attn_config": None, "layer_types": kinds} | sizes
    stored = write(tmp_path, HF_CLASS, config, SHAPES)
    check(convert(tmp_path)[0], stored, table())
