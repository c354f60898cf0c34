"""GLM-5.3-Flash from checkpoints made here, as it is published and as transformers saves it."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import FF, HEADS, VOCAB, D, convert, write
from .family_checks import (
    check_missing,
    dense_rows,
    expert_stacks,
    further_rows,
    keys_of,
    shapes_of,
)

CLASS = "Glm5NextForConditionalGeneration"
SIZE, RANK, Q_RANK, NOPE, VALUE, EXPERTS, EXPERT = 8, 24, 20, 12, 16, 3, 20
INNER, MIXED, POOL, INDEX, INDEX_HEADS = HEADS * SIZE, 24, 4, 6, 2
TEXT = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_size": D,
    "intermediate_size": FF,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "indexer_types": ["full", "full"],
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": 0,
    "v_head_dim": VALUE,
    "mla_use_nope": True,
    "index_topk": 8,
    "index_kpool": POOL,
    "index_head_dim": INDEX,
    "index_n_heads": INDEX_HEADS,
    "linear_attn_config": {
        "head_dim": SIZE,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}
CONNECTIONS = {
    f"hc_{half}_{part}": (shape, f"hc_{half}_{part}.weight")
    for half in ("attn", "ffn")
    for part, shape in (("fn", (MIXED, 4 * D)), ("base", (MIXED,)), ("scale", (3,)))
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
    "self_attn.A_log": ((HEADS,), "ssm_a"),
    "self_attn.dt_bias": ((INNER,), "ssm_dt.bias"),
    "self_attn.o_norm.weight": ((SIZE,), "ssm_norm.weight"),
    "self_attn.o_proj.weight": ((D, INNER), "attn_output.weight"),
}
KV_B = "self_attn.kv_b_proj.weight"
LATENT = {
    "self_attn.q_a_proj.weight": ((Q_RANK, D), "attn_q_a.weight"),
    "self_attn.q_a_layernorm.weight": ((Q_RANK,), "attn_q_a_norm.weight"),
    "self_attn.q_b_proj.weight": ((HEADS * NOPE, Q_RANK), "attn_q_b.weight"),
    "self_attn.kv_a_proj_with_mqa.weight": ((RANK, D), "attn_kv_a_mqa.weight"),
    "self_attn.kv_a_layernorm.weight": ((RANK,), "attn_kv_a_norm.weight"),
    KV_B: ((HEADS * (NOPE + VALUE), RANK), ""),
    "self_attn.o_proj.weight": ((D, HEADS * VALUE), "attn_output.weight"),
}
_INDEXER = "self_attn.indexer"
INDEXER = {
    f"{_INDEXER}.k_norm.weight": ((INDEX,), "indexer.k_norm.weight"),
    f"{_INDEXER}.k_norm.bias": ((INDEX,), "indexer.k_norm.bias"),
    f"{_INDEXER}.wk.weight": ((INDEX, D), "indexer.attn_k.weight"),
    f"{_INDEXER}.weights_proj.weight": ((INDEX_HEADS, D), "indexer.proj.weight"),
    f"{_INDEXER}.wq_b.weight": ((INDEX_HEADS * INDEX, Q_RANK), "indexer.attn_q_b.weight"),
    f"{_INDEXER}.index_kpool_compress_ape": ((POOL, INDEX), "indexer_compressor_ape.weight"),
    f"{_INDEXER}.index_kpool_compress_gate": ((INDEX, D), "indexer_compressor_gate.weight"),
}
DENSE = dense_rows(D, FF)
SPARSE = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "mlp.gate.e_score_correction_bias": ((EXPERTS,), "exp_probs_b.bias"),
    **dense_rows(D, EXPERT, "mlp.shared_experts.", "_shexp"),
}
FURTHER = further_rows(D, "shared_head.norm", "nextn.shared_head_norm")
PREFIX = "model.language_model."


def table(further: bool = True, indexer: bool = True) -> dict:
    """Return stored name -> shape, GGUF name, of what is not in a stack."""
    found: dict = {
        f"{PREFIX}embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
        f"{PREFIX}norm.weight": ((D,), "output_norm.weight"),
        "lm_head.weight": ((VOCAB, D), "output.weight"),
    }
    latent = LATENT | (INDEXER if indexer else {})
    of_layers = [NORMS | CONNECTIONS | LINEAR | DENSE, NORMS | CONNECTIONS | latent | SPARSE]
    if further:  # without connections: it has one stream
        of_layers.append(NORMS | LATENT | INDEXER | SPARSE | FURTHER)
    for layer, rows in enumerate(of_layers):
        for name, (shape, gguf) in rows.items():
            found[f"{PREFIX}layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return found


def stacks(further: bool = True) -> dict:
    return expert_stacks(
        PREFIX + "layers.{layer}.mlp.experts.{expert}.{part}_proj.weight",
        {"gate": (EXPERT, D), "up": (EXPERT, D), "down": (D, EXPERT)},
        (1, 2) if further else (1,),
        n_experts=EXPERTS,
    )


SHAPES = shapes_of(table(), stacks())
VISION = {"model.visual.patch_embed.proj.bias": (8,)}


def config(**changes) -> dict:
    return {"text_config": TEXT | changes, "tie_word_embeddings": None, "head_dim": None}


def check(made: dict, stored: dict, rows: dict, of_experts: dict) -> None:
    wanted = {}
    for name, (_, gguf) in rows.items():
        values = stored[name]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        if name.endswith("conv1d.weight"):
            assert made[gguf].shape == (1, INNER, 1, 4)
        if name.endswith(KV_B):
            k, v = np.split(values.reshape(HEADS, NOPE + VALUE, RANK), [NOPE], axis=1)
            wanted[f"{gguf}attn_k_b.weight"] = k.swapaxes(1, 2)
            wanted[f"{gguf}attn_v_b.weight"] = v
        else:
            wanted[gguf] = values
    for gguf, experts in of_experts.items():
        wanted[gguf] = np.stack([stored[name] for name in experts])
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name].ravel(), values.ravel()), name
    assert made["blk.0.ssm_a"].shape == (HEADS,)


KEYS = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": D,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": [0, 1, 1],
    "attention.key_length": RANK,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE,
    "attention.value_length_mla": VALUE,
    "attention.q_lora_rank": Q_RANK,
    "attention.kv_lora_rank": RANK,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
    "attention.layer_norm_epsilon": pytest.approx(1e-6),
    "rope.dimension_count": 0,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX,
    "attention.indexer.top_k": 8,
    "attention.indexer.kpool": POOL,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.types": [True, True],
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": pytest.approx(1e-6),
    "ssm.conv_kernel": 4,
    "kda.head_dim": SIZE,
    "kda.gate_lower_bound": -5.0,
    "leading_dense_block_count": 1,
    "vocab_size": VOCAB,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": 2,
    "expert_feed_forward_length": EXPERT,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "swiglu_clamp_exp": [10.0] * 3,
    "swiglu_clamp_shexp": [10.0] * 3,
    "nextn_predict_layers": 1,
}


def test_tensors_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, config(), SHAPES | VISION)
    made, metadata = convert(tmp_path)
    check(made, stored, table(), stacks())
    assert keys_of(metadata, "glm5-next") == KEYS


def test_without_further_blocks(tmp_path):
    stored = write(tmp_path, CLASS, config(), SHAPES)
    made, metadata = convert(tmp_path, mtp="drop")
    check(made, stored, table(False), stacks(False))
    keys = keys_of(metadata, "glm5-next")
    assert keys["block_count"] == 2 and "nextn_predict_layers" not in keys
    assert keys["attention.head_count_kv"] == [0, 1] and keys["swiglu_clamp_exp"] == [10.0] * 2


def test_what_transformers_saves(tmp_path):
    """Other words for kinds of layers and sizes of delta nets; what has defaults is left out."""
    saved = {
        "linear_attn_config": None,
        "linear_head_dim": SIZE,
        "linear_num_heads": HEADS,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -2.5,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 0,
        "num_nextn_predict_layers": None,
        "indexer_types": None,
        "hc_mult": None,
        "first_k_dense_replace": None,
    }
    text = {key: value for key, value in (TEXT | saved).items() if value is not None}
    shapes = shapes_of(table(False), stacks(False))
    stored = write(tmp_path, CLASS, config() | {"text_config": text}, shapes)
    made, metadata = convert(tmp_path)
    check(made, stored, table(False), stacks(False))
    keys = keys_of(metadata, "glm5-next")
    assert keys["kda.gate_lower_bound"] == -2.5 and keys["hyper_connection.count"] == 4
    assert keys["attention.head_count_kv"] == [0, 1] and "attention.indexer.types" not in keys


def test_a_layer_that_shares_choices_has_no_indexer(tmp_path):
    rows = table(indexer=False)
    stored = write(
        tmp_path, CLASS, config(indexer_types=["full", "shared"]), shapes_of(rows, stacks())
    )
    made, metadata = convert(tmp_path)
    check(made, stored, rows, stacks())
    assert metadata["glm5-next.attention.indexer.types"] == [True, False]


@pytest.mark.parametrize("name", [name for name in SHAPES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    words = f"'{name.replace(PREFIX, 'model.')}': is missing"
    check_missing(tmp_path, CLASS, config(), SHAPES, name, words)


def linear(**changes) -> dict:
    return {"linear_attn_config": TEXT["linear_attn_config"] | changes}


@pytest.mark.parametrize(
    "change, words",
    [
        (linear(num_heads=3), "linear attention have 3 heads, and others 4"),
        (linear(safe_gate=False), "'safe_gate' is false"),
        (linear(gate_lower_bound=1.0), "'linear_lower_bound' is 1, expected a number below 0"),
        ({"layer_types": ["full_attention"]}, "'layer_types' has 1 items"),
        ({"layer_types": ["full_attention", "x"]}, "one of them 'x'"),
        ({"indexer_types": ["full"]}, "'indexer_types' must say full or shared for each of 2"),
        ({"indexer_types": ["full", "x"]}, "'indexer_types' must say"),
        ({"mla_use_nope": False}, "'mla_use_nope' is false"),
        ({"mhc": False}, "'mhc' is false"),
        ({"hc_mult": 2}, "'hc_mult' is 2; GGUF's glm5-next implies 4"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
        ({"qk_rope_head_dim": 4}, "'qk_rope_head_dim' is 4; GGUF's glm5-next implies 0"),
        ({"index_topk": 6}, "index_topk 6 is not a multiple of index_kpool 4"),
        ({"index_kpool": 1}, "'index_kpool' is 1"),
        ({"index_kpool_always_select_tail": False}, "'index_kpool_always_select_tail' is false"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
        ({"num_hidden_layers": 1 << 30}, "'num_hidden_layers' is 1073741824"),
        ({"hidden_act": "gelu"}, "GGUF's glm5-next implies silu"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, CLASS, config(**change), {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)
