"""Phi-3.5-MoE from a checkpoint made here: LayerNorms and biases, and experts stored one by one."""

from __future__ import annotations

from dataclasses import replace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.runtime.model import load_model
from iqforge.runtime.split_model import make_plan

from .family_checkpoint import EXPERTS, FF, HEAD, KV, LAYER, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, shapes_of
from .thread_ranks import logits_on_ranks
from .tiny_cases import CASES, SMALL
from .tiny_models import make_tiny_model

NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "model.norm.bias": ((D,), "output_norm.bias"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "lm_head.bias": ((VOCAB,), "output.bias"),
}
for stored, shape, gguf in (
    ("input_layernorm", (D,), "attn_norm"),
    ("post_attention_layernorm", (D,), "ffn_norm"),
    ("self_attn.q_proj", (Q, D), "attn_q"),
    ("self_attn.k_proj", (KV, D), "attn_k"),
    ("self_attn.v_proj", (KV, D), "attn_v"),
    ("self_attn.o_proj", (D, Q), "attn_output"),
):
    NAMES[f"{LAYER}{stored}.weight"] = shape, f"blk.0.{gguf}.weight"
    NAMES[f"{LAYER}{stored}.bias"] = shape[:1], f"blk.0.{gguf}.bias"
NAMES[f"{LAYER}block_sparse_moe.gate.weight"] = (EXPERTS, D), "blk.0.ffn_gate_inp.weight"
STACKS = {
    f"blk.0.ffn_{part}_exps.weight": [
        f"{LAYER}block_sparse_moe.experts.{expert}.{name}.weight" for expert in range(EXPERTS)
    ]
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
SHAPES = shapes_of(NAMES) | {
    name: (D, FF) if ".w2." in name else (FF, D) for names in STACKS.values() for name in names
}
CONFIG = {
    "tie_word_embeddings": False,
    "num_local_experts": EXPERTS,
    "attention_bias": True,
    "lm_head_bias": True,
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + pair for pair in range(HEAD // 2)],
        "long_factor": [2.0 + pair for pair in range(HEAD // 2)],
        "short_mscale": 1.25,
        "long_mscale": 1.25,
    },
}


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, "PhiMoEForCausalLM", CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    for which, first in (("short", 1), ("long", 2)):
        factors = made.pop(f"rope_factors_{which}.weight")
        assert np.array_equal(factors.ravel(), np.arange(first, first + HEAD // 2))
    check_tensors(made, stored, NAMES, STACKS)
    keys = {
        "phimoe.feed_forward_length": FF,
        "phimoe.expert_count": EXPERTS,
        "phimoe.expert_used_count": 2,
        "phimoe.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "phimoe.attention.sliding_window": 0,
        "phimoe.rope.dimension_count": HEAD,
        "phimoe.rope.scaling.original_context_length": 32,
        "phimoe.rope.scaling.attn_factor": 1.25,
    }
    assert {key: metadata[key] for key in keys} == keys


def test_logits_with_a_bias(tmp_path):
    """All at once, and on ranks that have parts of the output."""
    base = CASES["phimoe"]
    case = replace(base, config=lambda s: base.config(s) | {"lm_head_bias": True})
    tiny = make_tiny_model(case, SMALL, tmp_path / "hf")
    path = iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    expected = torch.from_numpy(tiny.logits)
    with load_model(path) as model:
        plan = make_plan(model.source, (2, 1))
        torch.testing.assert_close(model.forward(tiny.tokens), expected, rtol=0, atol=1e-4)
    for found in logits_on_ranks(path, tiny.tokens, plan):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_needed(tmp_path, name):
    check_missing(tmp_path, "PhiMoEForCausalLM", CONFIG, SHAPES, name)
