"""Checkpoints that differ from what GGUF's form of their model implies are refused or announced."""

from __future__ import annotations

import json

import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import ConfigError

from .family_checkpoint import HEAD, SIZES, VOCAB, convert, write

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HUNYUAN = EXPERTS | {"moe_topk": 2}
DOTS1 = EXPERTS | {"n_shared_experts": 1}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
}
LATENT = EXPERTS | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL = {"model_type": "ministral3", "rope_parameters": YARN}
GEMMA2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu",  # the class does not read it
    "query_pre_attn_scalar": HEAD,
}
GEMMA3 = {"sliding_window": 8, "query_pre_attn_scalar": HEAD}
NEMOTRON = {"hidden_act": "relu2"}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
MINICPM3 = {"num_key_value_heads": 4, "qk_rope_head_dim": 8}
BOTH_FACTORS = {
    "type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * (HEAD // 2),
    "long_factor": [2.0] * (HEAD // 2),
}
BAILING = EXPERTS | {"num_shared_experts": 2, "n_group": 2, "topk_group": 1}
MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
STARCODER = {"norm_epsilon": 1e-5}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def metadata(folder, hf_class: str, config: dict) -> dict:
    write(folder, hf_class, config, {})
    with CheckpointSource(open_checkpoint(folder), vocab_only=True) as source:
        return {key: value.data for key, value in source.metadata.items()}


@pytest.mark.parametrize(
    "hf_class, base, change, words",
    [
        ("LlamaForCausalLM", {}, {"hidden_act": "gelu"}, "'gelu'; GGUF's llama implies silu"),
        ("Qwen2ForCausalLM", {}, {"hidden_act": "relu"}, "'relu'"),
        ("Phi3ForCausalLM", {}, {"hidden_act": "gelu"}, "'gelu'"),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, {"hidden_act": "silu"}, "'silu'"),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, {"hidden_activation": "relu"}, "'relu'"),
        (
            "GemmaForCausalLM",
            {"hidden_act": "gelu"},
            {"tie_word_embeddings": False},
            "implies true",
        ),
        ("Gemma2ForCausalLM", GEMMA2, {"hidden_activation": "silu"}, "implies gelu_pytorch_tanh"),
        ("Gemma3ForCausalLM", GEMMA3, {"hidden_activation": "gelu"}, "'gelu'"),
        ("Starcoder2ForCausalLM", STARCODER, {"hidden_act": "silu"}, "'silu'"),
        ("Qwen2MoeForCausalLM", EXPERTS, {"norm_topk_prob": True}, "qwen2moe implies false"),
        ("Qwen3MoeForCausalLM", EXPERTS, {"norm_topk_prob": False}, "qwen3moe implies true"),
        ("Qwen3NextForCausalLM", EXPERTS | DELTA, {"norm_topk_prob": False}, "norm_topk_prob"),
        ("DeepseekV3ForCausalLM", LATENT, {"rope_interleave": False}, "rope_interleave"),
        (
            "DeepseekV3ForCausalLM",
            LATENT,
            {"rope_parameters": YARN | {"mscale": 0.5}},
            "mscale' is 0.5; GGUF's deepseek2 implies 1",
        ),
        (
            "Ministral3ForCausalLM",
            MINISTRAL,
            {"rope_parameters": YARN | {"mscale_all_dim": 0.5}},
            "mscale' is 1; GGUF's mistral3 implies 0.5",
        ),
        ("GptOssForCausalLM", GPT_OSS, {"swiglu_limit": 3.0}, "'swiglu_limit' is 3; .* implies 7"),
        ("GptOssForCausalLM", GPT_OSS, {"layer_types": [GLOBAL]}, "does not alternate"),
        ("Gemma2ForCausalLM", GEMMA2, {"layer_types": [GLOBAL]}, "does not alternate"),
        ("Gemma2ForCausalLM", GEMMA2, {"query_pre_attn_scalar": 10}, f"implies {HEAD}"),
        ("Gemma3ForCausalLM", GEMMA3, {"query_pre_attn_scalar": 10}, f"implies {HEAD}"),
        (
            "Gemma3ForCausalLM",
            GEMMA3,
            {"num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL, GLOBAL, LOCAL]},
            "fixed period",
        ),
        ("PhiMoEForCausalLM", PHIMOE, {"router_jitter_noise": 0.1}, "phimoe implies 0.01"),
        ("PhiMoEForCausalLM", PHIMOE, {"num_experts_per_tok": 1}, "is 1; GGUF's phimoe implies 2"),
        ("PhiMoEForCausalLM", PHIMOE, {"hidden_act": "gelu"}, "'gelu'; GGUF's phimoe implies silu"),
        (
            "PhiMoEForCausalLM",
            PHIMOE | {"rope_scaling": BOTH_FACTORS | {"short_mscale": 1.2, "long_mscale": 1.2}},
            {"rope_scaling": BOTH_FACTORS | {"short_mscale": 1.2, "long_mscale": 1.3}},
            "'short_mscale' is 1.2 and 'long_mscale' 1.3",
        ),
        ("StableLmForCausalLM", {}, {"hidden_act": "gelu"}, "'gelu'; GGUF's stablelm implies silu"),
        (
            "StableLmForCausalLM",
            {},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' is not supported",
        ),
        ("NemotronForCausalLM", NEMOTRON, {"hidden_act": "silu"}, "'silu'"),
        ("NemotronForCausalLM", NEMOTRON, {"rope_percent": 1.0}, "is 1; GGUF's nemotron implies"),
        (
            "NemotronForCausalLM",
            NEMOTRON,
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "'yarn' is not supported",
        ),
        (
            "NemotronForCausalLM",
            NEMOTRON,
            {"partial_rotary_factor": 0.2},
            "'partial_rotary_factor'",
        ),
        ("MiniCPMForCausalLM", MINICPM, {"num_experts": 8}, "is 8; GGUF's minicpm implies 0"),
        ("MiniCPMForCausalLM", MINICPM, {"hidden_act": "fatrelu"}, "'fatrelu'"),
        (
            "MiniCPMForCausalLM",
            MINICPM,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported",
        ),
        (
            "MiniCPMForCausalLM",
            MINICPM,
            {"rope_scaling": BOTH_FACTORS | {"attention_factor": 1.5}},
            "'attention_factor' is 1.5; contexts of 32 and 64 imply 1.09",
        ),
        ("MiniCPM3ForCausalLM", MINICPM3, {"scale_depth": 1.2}, "is 1.2; .*minicpm3 implies 1.4"),
        ("MiniCPM3ForCausalLM", MINICPM3, {"scale_emb": 1}, "minicpm3 implies 12"),
        ("MiniCPM3ForCausalLM", MINICPM3, {"dim_model_base": 32}, "minicpm3 implies 256"),
        ("MiniCPM3ForCausalLM", MINICPM3, {"attention_bias": True}, "minicpm3 implies false"),
        ("MiniCPM3ForCausalLM", MINICPM3, {"num_key_value_heads": 2}, "minicpm3 implies 4"),
        ("BailingMoeV2ForCausalLM", BAILING, {"use_qk_norm": False}, "bailingmoe2 implies true"),
        ("BailingMoeV2ForCausalLM", BAILING, {"use_qkv_bias": True}, "bailingmoe2 implies false"),
        ("BailingMoeV2ForCausalLM", BAILING, {"use_bias": True}, "bailingmoe2 implies false"),
        ("BailingMoeV2ForCausalLM", BAILING, {"score_function": "softmax"}, "'softmax'"),
        (
            "BailingMoeV2ForCausalLM",
            BAILING,
            {"moe_shared_expert_intermediate_size": 24},
            "is 24; 2 shared experts of 16 imply 32",
        ),
        ("Dots1ForCausalLM", DOTS1, {"attention_bias": True}, "dots1 implies false"),
        ("Dots1ForCausalLM", DOTS1, {"moe_layer_freq": 2}, "is 2; GGUF's dots1 implies 1"),
        ("Dots1ForCausalLM", DOTS1, {"scoring_func": "softmax"}, "'softmax'; .* sigmoid"),
        ("HunYuanDenseV1ForCausalLM", {}, {"use_qk_norm": False}, "hunyuan-dense implies true"),
        ("HunYuanDenseV1ForCausalLM", {}, {"attention_bias": True}, "hunyuan-dense implies false"),
        ("HunYuanDenseV1ForCausalLM", {}, {"mlp_bias": True}, "hunyuan-dense implies false"),
        ("HunYuanDenseV1ForCausalLM", {}, {"use_cla": True}, "hunyuan-dense implies false"),
        ("HunYuanDenseV1ForCausalLM", {}, {"use_mla": True}, "hunyuan-dense implies false"),
        ("HunYuanDenseV1ForCausalLM", {}, {"use_rotary_pos_emb": False}, "implies true"),
        ("Exaone4ForCausalLM", {}, {"layer_types": [LOCAL, GLOBAL]}, "for each of 1 layers"),
        ("Exaone4ForCausalLM", {}, {"layer_types": ["x"]}, "must name sliding_attention or"),
        ("Exaone4ForCausalLM", {}, {"sliding_window_pattern": "LG"}, "the last of 1 layers"),
        ("Exaone4ForCausalLM", {}, {"sliding_window_pattern": "GX"}, "is 'GX', expected letters"),
        ("HunYuanDenseV1ForCausalLM", {}, {"position_embedding_xdrope": True}, "implies false"),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "alpha": 50.0}},
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'rope_scaling.alpha' is missing",
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"rope_scaling": {"type": "dynamic", "alpha": 50.0}},
            {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
            "alpha 1e[+]300 gives no base",
        ),
        ("HunYuanDenseV1ForCausalLM", {}, {"eod_token_id": VOCAB}, f"an id below {VOCAB}"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, {"use_mixed_mlp_moe": False}, "implies true"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, {"group_limited_greedy": True}, "implies false"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, {"moe_layer_num_skipped": 1}, "implies 0"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, {"num_shared_expert": [2]}, "is 2; .* implies 1"),
        ("HunYuanMoEV1ForCausalLM", HUNYUAN, {"moe_topk": 5}, "is 5, expected at most 4"),
        (
            "HunYuanMoEV1ForCausalLM",
            HUNYUAN | {"num_hidden_layers": 2, "moe_topk": [2, 2]},
            {"moe_topk": [2, 1]},
            "'moe_topk' must be one positive number for all 2 layers",
        ),
        (
            "HunYuanMoEV1ForCausalLM",
            HUNYUAN | {"num_hidden_layers": 2},
            {"moe_intermediate_size": [16]},
            "'moe_intermediate_size' must be one positive number for all 2 layers",
        ),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"use_qk_norm": False}, "minimax-m2 implies true"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"use_routing_bias": False}, "minimax-m2 implies true"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"qk_norm_type": "per_head"}, "implies per_layer"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"scoring_func": "softmax"}, "implies sigmoid"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"shared_intermediate_size": 8}, "is 8; .* implies 0"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"attn_type_list": [0]}, "has 0 for layer 0"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"rotary_dim": 7}, "rotary_dim is 7: of heads of 16"),
        ("MiniMaxM2ForCausalLM", MINIMAX, {"rotary_dim": 18}, "rotary_dim is 18"),
        (
            "MiniMaxM2ForCausalLM",
            MINIMAX | {"rotary_dim": 8},
            {"partial_rotary_factor": 0.25},
            "partial_rotary_factor says 4",
        ),
        ("OlmoeForCausalLM", EXPERTS, {"attention_bias": True}, "olmoe implies false"),
        ("OlmoeForCausalLM", EXPERTS, {"norm_topk_prob": True}, "olmoe implies false"),
        ("OlmoeForCausalLM", EXPERTS, {"clip_qkv": 8.0}, "'clip_qkv' is 8; .* implies null"),
        ("Glm4ForCausalLM", {}, {"rope_scaling": {"rope_type": "llama3"}}, "'llama3' is not"),
        ("Glm4ForCausalLM", {}, {"rope_parameters": {"mrope_section": [2]}}, "'mrope_section'"),
        ("ArceeForCausalLM", {}, {"hidden_act": "silu"}, "arcee implies relu2"),
        ("Olmo2ForCausalLM", {}, {"attention_bias": True}, "olmo2 implies false"),
        ("Olmo2ForCausalLM", {}, {"rope_scaling": {"rope_type": "llama3"}}, "'llama3' is not"),
        ("Olmo3ForCausalLM", {}, {"layer_types": [LOCAL] * 2}, "2 items; expected 1 times"),
        ("Olmo3ForCausalLM", {}, {"layer_types": ["chunked"]}, "one of them 'chunked'"),
        (
            "Olmo3ForCausalLM",
            {},
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}},
            "'linear' of sliding_attention; GGUF's olmo2 implies default",
        ),
        ("SeedOssForCausalLM", {}, {"attention_out_bias": True}, "seed_oss implies false"),
        ("SeedOssForCausalLM", {}, {"mlp_bias": True}, "seed_oss implies false"),
        ("SmolLM3ForCausalLM", {}, {"attention_bias": True}, "smollm3 implies false"),
        ("SmolLM3ForCausalLM", {}, {"mlp_bias": True}, "smollm3 implies false"),
        ("Ernie4_5ForCausalLM", {}, {"use_bias": True}, "ernie4_5 implies false"),
        ("Ernie4_5_MoeForCausalLM", EXPERTS, {"use_bias": True}, "ernie4_5-moe implies false"),
        ("Ernie4_5_MoeForCausalLM", EXPERTS, {"moe_norm_min": 0.1}, "'moe_norm_min' is 0.1"),
        (
            "Ernie4_5_MoeForCausalLM",
            EXPERTS | {"num_hidden_layers": 3, "moe_layer_end_index": 2},
            {"moe_layer_end_index": 1},
            "'moe_layer_end_index' is 1; GGUF's ernie4_5-moe has no dense layers after",
        ),
        (
            "SmolLM3ForCausalLM",
            {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
            {"no_rope_layers": [1, 1, 0, 1, 1]},
            "'no_rope_layers' names other layers",
        ),
        (
            "SmolLM3ForCausalLM",
            {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
            {"no_rope_layer_interval": 2},
            "'no_rope_layer_interval' names other layers",
        ),
    ],
)
def test_refused(tmp_path, hf_class, base, change, words):
    metadata(tmp_path / "base", hf_class, base)
    with pytest.raises(ConfigError, match=words):
        metadata(tmp_path / "changed", hf_class, base | change)


@pytest.mark.parametrize(
    "hf_class, base, name, size",
    [
        ("Qwen3ForCausalLM", {}, "qwen3", 128),
        ("Qwen3NextForCausalLM", DELTA | EXPERTS, "qwen3next", 256),
        ("Qwen3_5ForCausalLM", DELTA, "qwen35", 256),
        ("Qwen3_5MoeForCausalLM", DELTA | EXPERTS, "qwen35moe", 256),
        ("Gemma2ForCausalLM", GEMMA2 | {"query_pre_attn_scalar": 256}, "gemma2", 256),
        ("GptOssForCausalLM", GPT_OSS, "gpt-oss", 64),
        ("Ernie4_5ForCausalLM", {}, "ernie4_5", 128),
        ("LlamaForCausalLM", {}, "llama", 8),
        ("BailingMoeV2ForCausalLM", BAILING, "bailingmoe2", 128),
        ("Glm4ForCausalLM", {}, "glm4", 128),
    ],
)
def test_heads_that_the_config_does_not_name(monkeypatch, tmp_path, hf_class, base, name, size):
    """The size is the default of the model class, or else the width divided by the heads."""
    monkeypatch.delitem(SIZES, "head_dim")
    keys = metadata(tmp_path / "hf", hf_class, base)
    assert keys[f"{name}.attention.key_length"] == size


def test_the_largest_gemmas_have_another_scale(tmp_path):
    """32 = width / heads * 4 here, in as many layers as the models of 27 B parameters."""
    for hf_class, base, layers in (
        ("Gemma2ForCausalLM", GEMMA2, 46),
        ("Gemma3ForCausalLM", GEMMA3, 62),
    ):
        config = base | {"num_hidden_layers": layers, "query_pre_attn_scalar": 8, "head_dim": 16}
        metadata(tmp_path / hf_class, hf_class, config)  # 32 wide, 4 heads
        with pytest.raises(ConfigError, match="implies 8"):
            metadata(tmp_path / hf_class, hf_class, config | {"query_pre_attn_scalar": 16})


@pytest.mark.parametrize(
    "config, period",
    [
        ({"num_hidden_layers": 7}, None),
        ({"num_hidden_layers": 7, "layer_types": [LOCAL] * 5 + [GLOBAL, LOCAL]}, None),
        ({"num_hidden_layers": 4, "layer_types": [LOCAL] * 4}, None),
        ({"num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL] * 2}, 2),
        ({"num_hidden_layers": 3, "layer_types": [GLOBAL] * 3}, 1),
        ({"num_hidden_layers": 7, "layer_types": [LOCAL] * 7}, 8),
        ({"num_hidden_layers": 7, "sliding_window_pattern": 3}, 3),
    ],
)
def test_global_layers_of_gemma3(tmp_path, config, period):
    keys = metadata(tmp_path / "hf", "Gemma3ForCausalLM", GEMMA3 | config)
    assert keys.get("gemma3.attention.sliding_window_pattern") == period


@pytest.mark.parametrize(
    "hf_class, base, change, told",
    [
        ("MistralForCausalLM", {}, {"sliding_window": 8}, True),
        ("MistralForCausalLM", {}, {"sliding_window": None}, False),
        ("MistralForCausalLM", {}, {"sliding_window": 64}, False),  # the whole context
        ("Starcoder2ForCausalLM", STARCODER, {"sliding_window": 8}, True),
        ("Qwen2ForCausalLM", {}, {"sliding_window": 8}, False),
        ("Qwen2ForCausalLM", {}, {"sliding_window": 8, "use_sliding_window": False}, False),
        ("Qwen2ForCausalLM", {}, {"sliding_window": 8, "use_sliding_window": True}, True),
        (
            "Qwen3MoeForCausalLM",
            EXPERTS,
            {"sliding_window": 8, "use_sliding_window": True},
            True,
        ),
        ("Dots1ForCausalLM", DOTS1, {"sliding_window": 8}, False),
        ("Dots1ForCausalLM", DOTS1, {"sliding_window": 8, "max_window_layers": 0}, True),
        ("Dots1ForCausalLM", DOTS1, {"sliding_window": 8, "layer_types": [LOCAL]}, True),
        (
            "Dots1ForCausalLM",
            DOTS1 | {"max_window_layers": 0},  # the list says more
            {"sliding_window": 8, "layer_types": [GLOBAL]},
            False,
        ),
        ("Gemma3ForCausalLM", GEMMA3, {}, False),
        ("SmolLM3ForCausalLM", {}, {"sliding_window": 8}, False),
        ("SmolLM3ForCausalLM", {}, {"sliding_window": 8, "use_sliding_window": True}, True),
    ],
)
def test_windows_without_a_key_are_announced(tmp_path, caplog, hf_class, base, change, told):
    metadata(tmp_path / "hf", hf_class, base | change)
    assert ("a sliding window of 8 tokens" in caplog.text) == told


@pytest.mark.parametrize("key", ["q_lora_rank", "scale_depth", "dim_model_base"])
def test_factors_of_minicpm3_that_are_null(tmp_path, key):
    """Its class takes null for no factor, and for no latent vectors of queries."""
    write(tmp_path, "MiniCPM3ForCausalLM", MINICPM3, {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}))
    with pytest.raises(ConfigError, match=f"'{key}' is null"):
        convert(tmp_path, vocab_only=True)


def test_sparse_attention_of_minicpm_is_announced(tmp_path, caplog):
    metadata(tmp_path / "hf", "MiniCPMForCausalLM", MINICPM | {"sparse_config": {"dense_len": 99}})
    assert "sparse attention in texts of more than 99 tokens" in caplog.text


def test_special_tokens_of_glm_4(tmp_path):
    """Its tokenizer's files do not say which they are."""
    write(tmp_path, "Glm4ForCausalLM", {}, {})
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first = len(tokenizer["model"]["vocab"])
    names = ("<|endoftext|>", "[gMASK]", "<|user|>")
    special = {"special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    tokenizer["added_tokens"] = [
        {"id": first + i, "content": name, **special} for i, name in enumerate(names)
    ]
    file.write_text(json.dumps(tokenizer))
    _, keys = convert(tmp_path, vocab_only=True)
    found = {
        key: keys[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "eot", "unknown")
    }
    assert found == {"bos": first, "eos": first, "eot": first + 2, "unknown": first}
