"""Every family from a checkpoint made here: names and values of the converted tensors, and the keys
of the family.

Names are written out on both sides, so a clone without reference files still notices when one
changes.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from iqforge.api import open_source, plan_quantization
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import (
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV,
    KV_HEADS,
    LAYER,
    SANDWICH,
    VOCAB,
    D,
    Q,
    convert,
    full_names,
    write,
)
from .family_checks import check_missing, check_tensors, shapes_of

# stored name below a layer -> (shape, GGUF name without blk.0. and the suffix)
NORMS = {
    "input_layernorm.weight": ((D,), "attn_norm"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm"),
}
SEED_OSS_NORMS = {
    "input_layernorm.weight": ((D,), "attn_norm"),
    "post_attention_layernorm.weight": ((D,), "post_attention_norm"),
}
ATTENTION = {
    "self_attn.q_proj.weight": ((Q, D), "attn_q"),
    "self_attn.k_proj.weight": ((KV, D), "attn_k"),
    "self_attn.v_proj.weight": ((KV, D), "attn_v"),
    "self_attn.o_proj.weight": ((D, Q), "attn_output"),
}
QKV_BIASES = {
    "self_attn.q_proj.bias": ((Q,), "attn_q"),
    "self_attn.k_proj.bias": ((KV,), "attn_k"),
    "self_attn.v_proj.bias": ((KV,), "attn_v"),
}
HEAD_NORMS = {
    "self_attn.q_norm.weight": ((HEAD,), "attn_q_norm"),
    "self_attn.k_norm.weight": ((HEAD,), "attn_k_norm"),
}
JOINED_NORMS = {
    "self_attn.q_norm.weight": ((Q,), "attn_q_norm"),
    "self_attn.k_norm.weight": ((KV,), "attn_k_norm"),
}
POST_NORMS = {
    "post_attention_layernorm.weight": ((D,), "post_attention_norm"),
    "post_feedforward_layernorm.weight": ((D,), "post_ffw_norm"),
}
MLP = {
    "mlp.gate_proj.weight": ((FF, D), "ffn_gate"),
    "mlp.up_proj.weight": ((FF, D), "ffn_up"),
    "mlp.down_proj.weight": ((D, FF), "ffn_down"),
}
STARCODER = {
    "input_layernorm.bias": ((D,), "attn_norm"),
    "post_attention_layernorm.bias": ((D,), "ffn_norm"),
    "self_attn.o_proj.bias": ((D,), "attn_output"),
    "mlp.c_fc.weight": ((FF, D), "ffn_up"),
    "mlp.c_fc.bias": ((FF,), "ffn_up"),
    "mlp.c_proj.weight": ((D, FF), "ffn_down"),
    "mlp.c_proj.bias": ((D,), "ffn_down"),
}
NORM_BIASES = {
    "input_layernorm.bias": ((D,), "attn_norm"),
    "post_attention_layernorm.bias": ((D,), "ffn_norm"),
}
NEMOTRON = (
    NORMS
    | NORM_BIASES
    | {
        "mlp.up_proj.weight": ((FF, D), "ffn_up"),
        "mlp.down_proj.weight": ((D, FF), "ffn_down"),
    }
)
SHARED_EXPERT = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp"),
    "mlp.shared_expert_gate.weight": ((1, D), "ffn_gate_inp_shexp"),
    "mlp.shared_expert.gate_proj.weight": ((40, D), "ffn_gate_shexp"),
    "mlp.shared_expert.up_proj.weight": ((40, D), "ffn_up_shexp"),
    "mlp.shared_expert.down_proj.weight": ((D, 40), "ffn_down_shexp"),
}
FUSED = {
    "self_attn.qkv_proj.weight": ((Q + 2 * KV, D), "attn_qkv"),
    "self_attn.o_proj.weight": ((D, Q), "attn_output"),
    "mlp.gate_up_proj.weight": ((2 * FF, D), "ffn_up"),
    "mlp.down_proj.weight": ((D, FF), "ffn_down"),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

BAILING = {
    "num_experts": 8,
    "num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
}
BAILING_ATTENTION = {
    "attention.query_key_value.weight": ((Q + 2 * KV, D), "attn_qkv"),
    "attention.query_layernorm.weight": ((HEAD,), "attn_q_norm"),
    "attention.key_layernorm.weight": ((HEAD,), "attn_k_norm"),
    "attention.dense.weight": ((D, Q), "attn_output"),
}

MINICPM3 = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": D // HEADS,
}
MINICPM3_ATTENTION = {
    "self_attn.q_a_proj.weight": ((24, D), "attn_q_a"),
    "self_attn.q_a_layernorm.weight": ((24,), "attn_q_a_norm"),
    "self_attn.q_b_proj.weight": ((HEADS * 20, 24), "attn_q_b"),
    "self_attn.kv_a_proj_with_mqa.weight": ((16 + 8, D), "attn_kv_a_mqa"),
    "self_attn.kv_a_layernorm.weight": ((16,), "attn_kv_a_norm"),
    "self_attn.kv_b_proj.weight": ((HEADS * 12 + D, 16), "attn_kv_b"),
    "self_attn.o_proj.weight": ((D, D), "attn_output"),
}

EXAONE_NORMS = {
    name: SANDWICH[name]
    for name in ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
}
HUNYUAN_NORMS = {
    "self_attn.query_layernorm.weight": ((HEAD,), "attn_q_norm"),
    "self_attn.key_layernorm.weight": ((HEAD,), "attn_k_norm"),
}

FAMILIES = {
    "Qwen2ForCausalLM": (
        {},
        NORMS | ATTENTION | QKV_BIASES | MLP,
        {"qwen2.attention.key_length": HEAD},
    ),
    "Qwen3ForCausalLM": (
        {},
        NORMS | ATTENTION | HEAD_NORMS | MLP,
        {"qwen3.attention.head_count_kv": KV_HEADS},
    ),
    "GemmaForCausalLM": (
        {"hidden_act": "gelu", "hidden_activation": None},  # as first published
        NORMS | ATTENTION | MLP,
        {
            "gemma.attention.key_length": HEAD,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.eot_token_id": 107,
        },
    ),
    "Gemma2ForCausalLM": (
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 8},
        SANDWICH | ATTENTION | MLP,
        {
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
            "gemma2.attention.sliding_window": 8,
        },
    ),
    "Gemma3ForCausalLM": (
        {"sliding_window": 8, "rope_local_base_freq": 500.0},
        SANDWICH | ATTENTION | HEAD_NORMS | MLP,
        {"gemma3.rope.freq_base": 1e4, "gemma3.rope.freq_base_swa": 500.0},
    ),
    "Phi3ForCausalLM": (
        {"sliding_window": None},
        NORMS | FUSED,
        {
            "phi3.rope.dimension_count": HEAD,
            "phi3.attention.sliding_window": 0,
            "phi3.rope.scaling.original_context_length": 4096,
        },
    ),
    "Starcoder2ForCausalLM": (
        {"norm_epsilon": 1e-3},
        NORMS | ATTENTION | QKV_BIASES | STARCODER,
        {"starcoder2.attention.layer_norm_epsilon": pytest.approx(1e-3)},
    ),
    "SeedOssForCausalLM": (
        {},
        SEED_OSS_NORMS | ATTENTION | QKV_BIASES | MLP,
        {"seed_oss.attention.key_length": HEAD, "seed_oss.attention.head_count_kv": KV_HEADS},
    ),
    "SmolLM3ForCausalLM": (
        {"no_rope_layers": [1, 1, 1, 0]},
        NORMS | ATTENTION | MLP,
        {"smollm3.rope.dimension_count": HEAD, "smollm3.vocab_size": VOCAB},
    ),
    "ArceeForCausalLM": (
        {"hidden_act": "relu2"},
        NORMS
        | ATTENTION
        | {"mlp.up_proj.weight": MLP["mlp.up_proj.weight"]}
        | {"mlp.down_proj.weight": MLP["mlp.down_proj.weight"]},
        {"arcee.rope.dimension_count": HEAD, "arcee.vocab_size": VOCAB},
    ),
    "Glm4ForCausalLM": (
        {"partial_rotary_factor": None},
        NORMS
        | {
            "post_self_attn_layernorm.weight": ((D,), "post_attention_norm"),
            "post_mlp_layernorm.weight": ((D,), "post_ffw_norm"),
        }
        | ATTENTION
        | QKV_BIASES
        | {name: found for name, found in FUSED.items() if name.startswith("mlp.")},
        {"glm4.attention.key_length": HEAD, "glm4.rope.dimension_count": HEAD // 2},
    ),
    "Olmo2ForCausalLM": (
        {},
        POST_NORMS | ATTENTION | JOINED_NORMS | MLP,
        {"olmo2.attention.key_length": HEAD, "olmo2.rope.freq_base": 1e4},
    ),
    "Olmo3ForCausalLM": (
        {"sliding_window": 8, "rope_theta": None},
        POST_NORMS | ATTENTION | JOINED_NORMS | MLP,
        {
            "olmo2.attention.sliding_window": 8,
            "olmo2.attention.sliding_window_pattern": [True],
            "olmo2.rope.freq_base": 5e5,
            "olmo2.rope.freq_base_swa": 5e5,
        },
    ),
    "Ernie4_5ForCausalLM": (
        {"rope_theta": None},
        NORMS | ATTENTION | MLP,
        {"ernie4_5.attention.key_length": HEAD, "ernie4_5.rope.freq_base": 5e5},
    ),
    "Exaone4ForCausalLM": (
        {"sliding_window": None},
        EXAONE_NORMS | ATTENTION | HEAD_NORMS | MLP,
        {"exaone4.vocab_size": VOCAB, "exaone4.attention.sliding_window": 4096},
    ),
    "HunYuanDenseV1ForCausalLM": (
        {},
        NORMS | ATTENTION | HUNYUAN_NORMS | MLP,
        {"hunyuan-dense.attention.key_length": HEAD, "hunyuan-dense.rope.freq_base": 1e4},
    ),
    "GraniteForCausalLM": (
        {"embedding_multiplier": 12, "logits_scaling": 8.0, "attention_multiplier": 0.25},
        NORMS | ATTENTION | MLP,
        {
            "granite.embedding_scale": 12.0,
            "granite.logit_scale": 8.0,
            "granite.attention.scale": 0.25,
            "granite.rope.dimension_count": HEAD,
            "granite.vocab_size": VOCAB,
        },
    ),
    "StableLMEpochForCausalLM": (
        {"norm_eps": 1e-4, "rope_pct": 0.5, "use_qkv_bias": True},
        NORMS | NORM_BIASES | ATTENTION | QKV_BIASES | MLP,
        {
            "stablelm.attention.layer_norm_epsilon": pytest.approx(1e-4),
            "stablelm.rope.dimension_count": HEAD // 2,
            "stablelm.use_parallel_residual": False,
        },
    ),
    "NemotronForCausalLM": (
        {"rms_norm_eps": None, "norm_eps": 1e-5, "hidden_act": "relu2"},
        NEMOTRON | ATTENTION,
        {
            "nemotron.attention.layer_norm_epsilon": pytest.approx(1e-5),
            "nemotron.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
            "nemotron.attention.key_length": HEAD,
            "nemotron.rope.dimension_count": HEAD // 2,
            "nemotron.rope.scaling.type": "none",
            "nemotron.vocab_size": VOCAB,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.unknown_token_id": 1,
        },
    ),
    "MiniCPMForCausalLM": (
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
        NORMS | ATTENTION | MLP,
        {
            "minicpm.embedding_scale": 12.0,
            "minicpm.residual_scale": pytest.approx(1.4),
            "minicpm.logit_scale": 2.0,
        },
    ),
    "MiniCPM3ForCausalLM": (
        MINICPM3,
        NORMS | MINICPM3_ATTENTION | MLP,
        {
            "minicpm3.attention.key_length": 20,
            "minicpm3.attention.q_lora_rank": 24,
            "minicpm3.attention.kv_lora_rank": 16,
            "minicpm3.rope.dimension_count": 8,
            "minicpm3.vocab_size": VOCAB,
        },
    ),
    "BailingMoeV2ForCausalLM": (
        BAILING,
        NORMS | BAILING_ATTENTION | MLP,
        {
            "bailingmoe2.rope.dimension_count": HEAD // 2,
            "bailingmoe2.vocab_size": VOCAB,
            "bailingmoe2.leading_dense_block_count": 1,
            "bailingmoe2.expert_gating_func": 2,
            "bailingmoe2.expert_group_count": 4,
            "bailingmoe2.expert_group_used_count": 2,
            "bailingmoe2.expert_shared_feed_forward_length": 24,
            "bailingmoe2.expert_weights_scale": 2.5,
            "bailingmoe2.expert_weights_norm": True,
        },
    ),
    "Ministral3ForCausalLM": (
        {"model_type": "ministral3", "rope_parameters": YARN},
        NORMS | MLP | ATTENTION,
        {
            "mistral3.attention.temperature_scale": pytest.approx(0.1),
            "mistral3.rope.freq_base": 1e6,
            "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
}
# whose rotary halves become pairs
PAIRED = (
    "ArceeForCausalLM",
    "GraniteForCausalLM",
    "MiniCPMForCausalLM",
    "Ministral3ForCausalLM",
    "SmolLM3ForCausalLM",
)


@pytest.mark.parametrize("hf_class", FAMILIES)
def test_names_values_and_keys(tmp_path: Path, hf_class: str):
    config, tensors, keys = FAMILIES[hf_class]
    names = full_names(tensors)
    if hf_class.startswith(("Starcoder2", "Nemotron", "StableL")):
        names["model.norm.bias"] = ((D,), "output_norm.bias")
    if hf_class == "BailingMoeV2ForCausalLM":
        names["model.word_embeddings.weight"] = names.pop("model.embed_tokens.weight")
    stored = write(tmp_path, hf_class, config, shapes_of(names))
    made, metadata = convert(tmp_path)

    def moved(name: str, values: np.ndarray) -> np.ndarray:
        gguf = names[name][1]
        if hf_class.startswith(("Gemma", "Nemotron")) and gguf.endswith("_norm.weight"):
            return values + np.float32(1)
        if hf_class in PAIRED and gguf in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            return values.reshape(-1, 2, HEAD // 2, D).swapaxes(1, 2).reshape(values.shape)
        return values

    check_tensors(made, stored, names, moved=moved)
    assert {key: metadata[key] for key in keys} == keys
    for name in names:
        check_missing(tmp_path, hf_class, config, shapes_of(names), name)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "hf_class, stem, parts, others",
    [
        (
            "MixtralForCausalLM",
            "block_sparse_moe",
            {"w1": "gate", "w3": "up", "w2": "down"},
            {"block_sparse_moe.gate.weight": ((EXPERTS, D), "ffn_gate_inp")},
        ),
        (
            "Qwen2MoeForCausalLM",
            "mlp",
            {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
            QKV_BIASES | SHARED_EXPERT,
        ),
    ],
)
def test_experts(
    tmp_path: Path, hf_class: str, stem: str, parts: dict[str, str], others: dict, merge: bool
):
    experts = {
        f"{LAYER}{stem}.experts.{x}.{name}.weight": (D, FF) if part == "down" else (FF, D)
        for x in range(EXPERTS)
        for name, part in parts.items()
    }
    names = full_names(NORMS | ATTENTION | others)
    config = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": FF,
        "shared_expert_intermediate_size": 40,
    }
    stored = write(tmp_path, hf_class, config, shapes_of(names) | experts)
    made, metadata = convert(tmp_path, merge_gate_up=merge)
    stacks = {
        part: np.stack([stored[f"{LAYER}{stem}.experts.{x}.{name}.weight"] for x in range(EXPERTS)])
        for name, part in parts.items()
    }
    if merge:
        stacks["gate_up"] = np.concatenate([stacks.pop("gate"), stacks.pop("up")], axis=1)
    assert set(made) == {gguf for _, gguf in names.values()} | {
        f"blk.0.ffn_{part}_exps.weight" for part in stacks
    }
    for part, values in stacks.items():
        assert np.array_equal(made[f"blk.0.ffn_{part}_exps.weight"], values)
    for name, (_, gguf) in names.items():
        if hf_class != "MixtralForCausalLM" or gguf not in (
            "blk.0.attn_q.weight",
            "blk.0.attn_k.weight",
        ):
            assert np.array_equal(made[gguf], stored[name])
    arch = metadata["general.architecture"]
    assert (
        arch == ("llama" if stem != "mlp" else "qwen2moe")
        and metadata[f"{arch}.expert_count"] == EXPERTS
    )
    assert stem != "mlp" or metadata["qwen2moe.expert_shared_feed_forward_length"] == 40


def gpt_oss_shapes(packed: bool) -> dict[str, tuple[int, ...]]:
    width = 64  # rows of whole MXFP4 blocks
    shapes = shapes_of(full_names(NORMS | ATTENTION | QKV_BIASES))
    shapes |= {
        LAYER + name: shape
        for name, shape in {
            "self_attn.o_proj.bias": (D,),
            "self_attn.sinks": (HEADS,),
            "mlp.router.weight": (EXPERTS, D),
            "mlp.router.bias": (EXPERTS,),
            "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * width),
            "mlp.experts.down_proj_bias": (EXPERTS, D),
        }.items()
    }
    if not packed:
        shapes |= {
            LAYER + "mlp.experts.gate_up_proj": (EXPERTS, D, 2 * width),
            LAYER + "mlp.experts.down_proj": (EXPERTS, width, D),
        }
    return shapes


GPT_OSS = {
    "intermediate_size": 64,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}


@pytest.mark.parametrize("merge", [False, True])
def test_gpt_oss_experts_are_untangled(tmp_path: Path, merge: bool):
    stored = write(tmp_path, "GptOssForCausalLM", GPT_OSS, gpt_oss_shapes(packed=False))
    made, metadata = convert(tmp_path, merge_gate_up=merge)
    both, biases = (
        stored[LAYER + "mlp.experts.gate_up_proj"],
        stored[LAYER + "mlp.experts.gate_up_proj_bias"],
    )
    gate, up = both[:, :, ::2].swapaxes(1, 2), both[:, :, 1::2].swapaxes(1, 2)
    halves = {"gate_up": np.concatenate([gate, up], axis=1)} if merge else {"gate": gate, "up": up}
    halves["down"] = stored[LAYER + "mlp.experts.down_proj"].swapaxes(1, 2)
    gate, up = biases[:, ::2], biases[:, 1::2]
    bias = {"gate_up": np.concatenate([gate, up], axis=1)} if merge else {"gate": gate, "up": up}
    for part, values in halves.items():
        assert np.array_equal(made[f"blk.0.ffn_{part}_exps.weight"], values)
    for part, values in bias.items():
        assert np.array_equal(made[f"blk.0.ffn_{part}_exps.bias"], values)
    for name, gguf in (
        ("self_attn.sinks", "attn_sinks.weight"),
        ("mlp.router.bias", "ffn_gate_inp.bias"),
        ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ):
        assert np.array_equal(made[f"blk.0.{gguf}"], stored[LAYER + name])
    assert (
        metadata["gpt-oss.expert_feed_forward_length"] == 64
        and metadata["gpt-oss.attention.sliding_window"] == 8
    )


def test_gpt_oss_mxfp4_codes_are_kept(tmp_path: Path):
    from safetensors.numpy import save_file

    stored = write(tmp_path, "GptOssForCausalLM", GPT_OSS, gpt_oss_shapes(packed=True))
    random = np.random.default_rng(3)
    packed = {
        LAYER + f"mlp.experts.{part}_proj_{kind}": random.integers(0, 256, shape, np.uint8)
        for part, kind, shape in (
            ("gate_up", "blocks", (EXPERTS, 128, 1, 16)),
            ("gate_up", "scales", (EXPERTS, 128, 1)),
            ("down", "blocks", (EXPERTS, D, 2, 16)),
            ("down", "scales", (EXPERTS, D, 2)),
        )
    }
    save_file(stored | packed, tmp_path / "model.safetensors")
    made, metadata = convert(tmp_path)
    assert metadata["general.file_type"] == 38
    with open_source(tmp_path) as source:
        types = {
            plan.target.name: plan.target.type.name for plan in plan_quantization(source, "Q4_0")
        }
        assert (
            types["blk.0.ffn_up_exps.weight"] == "MXFP4" and types["blk.0.attn_q.weight"] == "Q4_0"
        )
        types = {
            plan.target.name: plan.target.type.name
            for plan in plan_quantization(source, "Q4_0", allow_requantize=True)
        }
        assert types["blk.0.ffn_up_exps.weight"] == types["blk.0.ffn_down_exps.weight"] == "Q4_0"

    def blocks(part: str) -> np.ndarray:
        pairs, scales = (
            packed[LAYER + f"mlp.experts.{part}_proj_{kind}"] for kind in ("blocks", "scales")
        )
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, 32)
        return np.concatenate(
            [scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1
        ).reshape(*scales.shape[:2], -1)

    both = blocks("gate_up")
    for part, values in (("gate", both[:, ::2]), ("up", both[:, 1::2]), ("down", blocks("down"))):
        assert np.array_equal(
            made[f"blk.0.ffn_{part}_exps.weight"], values.reshape(-1, values.shape[-1])
        )
    save_file(
        stored
        | {name: values for name, values in packed.items() if "down_proj_scales" not in name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match="layer 0 lacks experts"):
        convert(tmp_path)


def test_longrope(tmp_path: Path):
    config, tensors, _ = FAMILIES["Phi3ForCausalLM"]
    shapes = shapes_of(full_names(tensors))
    scaling = {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [2.5] * 6}
    settings = config | {
        "rope_scaling": scaling,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    }
    write(tmp_path, "Phi3ForCausalLM", settings, shapes)
    made, metadata = convert(tmp_path)
    assert (
        made["rope_factors_short.weight"].tolist() == [1.5] * 6
        and made["rope_factors_long.weight"].tolist() == [2.5] * 6
    )
    assert metadata["phi3.rope.dimension_count"] == 12 and metadata[
        "phi3.rope.scaling.attn_factor"
    ] == pytest.approx((17 / 12) ** 0.5)
    for wrong, words in (
        ({"rope_scaling": scaling | {"long_factor": [1.0] * 5}}, "a list of 6 positive numbers"),
        ({"partial_rotary_factor": 1.5}, "24 rotated dimensions of 16"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
    ):
        write(tmp_path, "Phi3ForCausalLM", settings | wrong, shapes)
        with pytest.raises(ConfigError, match=words):
            convert(tmp_path)


@pytest.mark.parametrize(
    "n_vocab, keys",
    [
        (
            32016,
            {
                "prefix_token_id": 32007,
                "suffix_token_id": 32008,
                "middle_token_id": 32009,
                "eot_token_id": 32010,
                "add_bos_token": True,
            },
        ),
        (49152, {"add_bos_token": False, "prefix_token_id": None}),
        (VOCAB, {"add_bos_token": True, "prefix_token_id": None}),
    ],
)
def test_llama_vocabularies_known_by_their_size(tmp_path: Path, n_vocab: int, keys: dict):
    write(tmp_path, "LlamaForCausalLM", {"vocab_size": n_vocab}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert {key: metadata.get(f"tokenizer.ggml.{key}") for key in keys} == keys


def test_the_page_shows_the_file_as_it_is():
    """The guide shows a real file, and the files that it refers to exist."""
    root = Path(__file__).parents[1]  # of the clone: an installed package has no docs/
    page = (root / "docs/guide/adding-an-architecture.md").read_text()
    assert f"```python\n{(root / 'convert/architectures/starcoder2.py').read_text()}```" in page
    table = page.partition("## When")[2].partition("Keys that only")[0]
    for name in re.findall(r"`([\w/]+\.py)`", table):
        assert (root / name).exists() or (root / "convert/architectures" / name).exists(), name
