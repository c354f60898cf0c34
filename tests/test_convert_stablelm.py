"""StableLM 2 12B from a checkpoint made here: one stored norm for each head, and none before the
feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

import iqforge
import pytest
import torch
from iqforge.errors import CheckpointError
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings

from .family_checkpoint import FF, HEAD, VOCAB, D, convert, write
from .family_checks import check_missing, check_tensors, shapes_of
from .tiny_cases import CASES, SMALL
from .tiny_cases_stablelm import OF_12B
from .tiny_models import make_tiny_model

LAYER = "model.layers.0."
HEADS = D // HEAD
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "model.norm.bias": ((D,), "output_norm.bias"),
    f"{LAYER}input_layernorm.weight": ((D,), "blk.0.attn_norm.weight"),
    f"{LAYER}input_layernorm.bias": ((D,), "blk.0.attn_norm.bias"),
    f"{LAYER}self_attn.q_proj.weight": ((D, D), "blk.0.attn_q.weight"),
    f"{LAYER}self_attn.k_proj.weight": ((HEAD, D), "blk.0.attn_k.weight"),
    f"{LAYER}self_attn.v_proj.weight": ((HEAD, D), "blk.0.attn_v.weight"),
    f"{LAYER}self_attn.o_proj.weight": ((D, D), "blk.0.attn_output.weight"),
    f"{LAYER}mlp.gate_proj.weight": ((FF, D), "blk.0.ffn_gate.weight"),
    f"{LAYER}mlp.up_proj.weight": ((FF, D), "blk.0.ffn_up.weight"),
    f"{LAYER}mlp.down_proj.weight": ((D, FF), "blk.0.ffn_down.weight"),
}
STACKS = {
    f"blk.0.attn_{part}_norm.weight": [
        f"{LAYER}self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads)
    ]
    for part, heads in (("q", HEADS), ("k", 1))
}
NORMS = {name: (HEAD,) for names in STACKS.values() for name in names}
SHAPES = shapes_of(NAMES) | NORMS
CONFIG = {
    "head_dim": None,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": True,
    "use_parallel_residual": True,
}


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, "StableLmForCausalLM", CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    keys = {
        "stablelm.attention.layer_norm_epsilon": pytest.approx(1e-5),
        "stablelm.rope.dimension_count": HEAD // 2,
        "stablelm.use_parallel_residual": True,
    }
    assert {key: metadata[key] for key in keys} == keys
    assert "stablelm.rope.freq_base" not in metadata


def test_logits(tmp_path):
    """All at once and token by token."""
    base = CASES["stablelm"]
    case = replace(base, config=lambda s: base.config(s) | OF_12B)
    tiny = make_tiny_model(case, SMALL, tmp_path / "hf")
    path = iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    with load_model(path) as model:
        state = model.new_state(len(tiny.tokens), CacheSettings("f32", "f32"))
        steps = torch.stack([model.extend([token], state) for token in tiny.tokens])
        for found in (model.forward(tiny.tokens), steps):
            torch.testing.assert_close(found, torch.from_numpy(tiny.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_needed(tmp_path, name):
    whole = name.partition(".norms")[0]
    words = rf"'{whole}\.weight': is missing"
    check_missing(tmp_path, "StableLmForCausalLM", CONFIG, SHAPES, name, words)


@pytest.mark.parametrize("head, shape, words", [(HEADS, (HEAD,), "no such"), (0, (D,), "shape")])
def test_other_norms_are_refused(tmp_path, head, shape, words):
    name = f"{LAYER}self_attn.q_layernorm.norms.{head}.weight"
    write(tmp_path, "StableLmForCausalLM", CONFIG, SHAPES | {name: shape})
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)
