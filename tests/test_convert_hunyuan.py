"""Hunyuan with experts, the base of its rotary frequencies, and its vocabularies, from checkpoints
made here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .family_checkpoint import (
    EXPERTS,
    FF,
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
from .tiny_checkpoint import write_ranks

WIDE = 20  # hidden size of a routed expert
DYNAMIC = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
# as published: what may differ from layer to layer is a list
CONFIG = {
    "num_hidden_layers": 2,
    "num_experts": EXPERTS,
    "moe_topk": [2, 2],
    "moe_intermediate_size": [WIDE, WIDE],
    "num_shared_expert": [1, 1],
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "rope_scaling": DYNAMIC,
    "max_position_embeddings": 32768,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
}
for _layer in range(2):
    for _stored, _shape, _gguf in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.query_layernorm", (HEAD,), "attn_q_norm"),
        ("self_attn.key_layernorm", (HEAD,), "attn_k_norm"),
        ("mlp.gate.wg", (EXPERTS, D), "ffn_gate_inp"),
        ("mlp.shared_mlp.gate_proj", (FF, D), "ffn_gate_shexp"),
        ("mlp.shared_mlp.up_proj", (FF, D), "ffn_up_shexp"),
        ("mlp.shared_mlp.down_proj", (D, FF), "ffn_down_shexp"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}.weight"] = _shape, f"blk.{_layer}.{_gguf}.weight"
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
STACKS = expert_stacks(
    "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", PARTS, range(2)
)
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path: Path):
    stored = write(tmp_path, "HunYuanMoEV1ForCausalLM", CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "hunyuan-moe") == {
        "block_count": 2,
        "context_length": 262144,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": pytest.approx(1e4 * 1000 ** (16 / 14), rel=1e-6),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 262144,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": WIDE,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": FF,
    }


@pytest.mark.parametrize("missing", sorted(name for name in SHAPES if ".1." not in name))
def test_what_is_missing_is_named(tmp_path: Path, missing: str):
    words = "layer 0 lacks experts" if ".experts." in missing else None
    check_missing(tmp_path, "HunYuanMoEV1ForCausalLM", CONFIG, SHAPES, missing, words)


def test_experts_are_as_wide_as_the_shared_one_unless_told(tmp_path: Path):
    """transformers' class has one width for both, and one number for all layers."""
    change = {"moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": None}
    write(tmp_path, "HunYuanMoEV1ForCausalLM", CONFIG | change, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["hunyuan-moe.expert_feed_forward_length"] == FF
    assert metadata["hunyuan-moe.expert_used_count"] == 2


@pytest.mark.parametrize(
    "config, base, context",
    [
        ({"rope_scaling": None}, 1e4, 64),
        ({"rope_scaling": DYNAMIC}, 1e4 * 1000 ** (16 / 14), 64),
        ({"rope_scaling": DYNAMIC, "max_position_embeddings": 262144}, None, 262144),
        ({"rope_scaling": DYNAMIC, "max_position_embeddings": 32768}, None, 262144),
        ({"rope_scaling": None, "max_position_embeddings": 32768}, 1e4, 32768),
        (
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 500.0}},
            500 * 50 ** (16 / 14),
            64,
        ),
    ],
)
def test_base_and_context(tmp_path: Path, config: dict, base: float | None, context: int):
    write(tmp_path, "HunYuanDenseV1ForCausalLM", config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["hunyuan-dense.context_length"] == context
    if base is not None:
        assert metadata["hunyuan-dense.rope.freq_base"] == pytest.approx(base, rel=1e-6)


@pytest.mark.parametrize(
    "config, named",
    [
        ({"head_dim": None, "attention_head_dim": HEAD}, HEAD),
        ({"head_dim": None, "attention_head_dim": D // HEADS}, None),  # what it is by default
        ({"head_dim": None}, None),
        ({"head_dim": D // HEADS}, D // HEADS),
    ],
)
def test_other_name_of_the_head_size(tmp_path: Path, config: dict, named: int | None):
    write(tmp_path, "HunYuanDenseV1ForCausalLM", config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata.get("hunyuan-dense.attention.key_length") == named


def test_ends_of_texts_and_of_turns(tmp_path: Path):
    """The first of several ends that are generated ends a turn; `eod_token_id` ends a text."""
    config = {"eos_token_id": 5, "eod_token_id": 7}
    write(tmp_path, "HunYuanDenseV1ForCausalLM", config, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["tokenizer.ggml.eos_token_id"] == 7
    assert metadata["tokenizer.ggml.eot_token_id"] == 9
    write(tmp_path, "HunYuanDenseV1ForCausalLM", {"eod_token_id": -1}, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    _, metadata = convert(tmp_path, vocab_only=True)
    assert "tokenizer.ggml.eot_token_id" not in metadata


@pytest.mark.parametrize(
    "hf_class, width, begins",
    [
        ("HunYuanMoEV1ForCausalLM", D, "<|bos|>"),
        ("HunYuanDenseV1ForCausalLM", 4096, "<|startoftext|>"),
        ("HunYuanDenseV1ForCausalLM", 2048, "<|extra_4|>"),
    ],
)
def test_vocabulary_of_ranks(tmp_path: Path, hf_class: str, width: int, begins: str):
    """`hy.tiktoken` has no special tokens: they are in the code of the model, and the ids of
    config.json are those of another vocabulary.
    """
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    n = len(write_ranks(ranks))
    config = CONFIG | {"hidden_size": width, "vocab_size": n + 210, "bos_token_id": 1}
    write(tmp_path / "hf", hf_class, config, {})
    (tmp_path / "hf/tokenizer.json").unlink()
    lines = (ranks / "tiktoken.model").read_text()
    # A token that comes again counts for nothing.
    (tmp_path / "hf/hy.tiktoken").write_text(lines + lines.partition("\n")[0] + "\n")
    own = {"bos_token": "<|extra_4|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(own))
    _, metadata = convert(tmp_path / "hf", vocab_only=True)
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens = keys["tokens"]
    assert tokens[n : n + 6] == [
        *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>")
    ]
    assert tokens[-1] == "<|extra_204|>" and keys["token_type"] == [1] * n + [3] * 210
    assert keys["pre"] == "hunyuan" and keys["normalizer.nfc"] is True
    assert tokens[keys["bos_token_id"]] == begins
    assert (keys["eos_token_id"], keys["padding_token_id"]) == (n + 3, n + 4)


def test_the_pre_tokenizer_has_a_name_of_its_own(tmp_path: Path):
    write(tmp_path, "HunYuanDenseV1ForCausalLM", {}, {})
    for name, own in (("deepseek-v3", "hunyuan-dense"), ("qwen2", "qwen2")):
        split_as(tmp_path, name)
        assert convert(tmp_path, vocab_only=True)[1]["tokenizer.ggml.pre"] == own
        assert convert(tmp_path, vocab_only=True, pre=name)[1]["tokenizer.ggml.pre"] == name
