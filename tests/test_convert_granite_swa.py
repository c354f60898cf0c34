"""Granite with windows and sinks, from checkpoints made here."""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import (
    EMBEDDING,
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV,
    LAYER,
    D,
    Q,
    convert,
    write,
)
from .family_checks import check_missing, check_tensors, keys_of, shapes_of
from .tiny_cases_granite import FACTORS

CLASS, MOE_CLASS = "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"
NEAR, FAR = "sliding_attention", "full_attention"
SHARED = 20  # hidden size of the expert that works on every token
CONFIG = FACTORS | {
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": SHARED,
    "sliding_window": 9,
    "layer_types": [NEAR],
}
MOE = f"{LAYER}block_sparse_moe."
# stored name -> (shape, GGUF name)
NAMES = {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()} | {
    f"{LAYER}input_layernorm.weight": ((D,), "blk.0.attn_norm.weight"),
    f"{LAYER}post_attention_layernorm.weight": ((D,), "blk.0.ffn_norm.weight"),
    f"{LAYER}self_attn.q_proj.weight": ((Q, D), "blk.0.attn_q.weight"),
    f"{LAYER}self_attn.k_proj.weight": ((KV, D), "blk.0.attn_k.weight"),
    f"{LAYER}self_attn.v_proj.weight": ((KV, D), "blk.0.attn_v.weight"),
    f"{LAYER}self_attn.o_proj.weight": ((D, Q), "blk.0.attn_output.weight"),
    f"{LAYER}self_attn.sinks": ((HEADS,), "blk.0.attn_sinks.weight"),
    f"{MOE}router.weight": ((EXPERTS, D), "blk.0.ffn_gate_inp.weight"),
    f"{MOE}experts.gate_up_proj": ((EXPERTS, 2 * FF, D), "blk.0.ffn_gate_up_exps.weight"),
    f"{MOE}experts.down_proj": ((EXPERTS, D, FF), "blk.0.ffn_down_exps.weight"),
    f"{LAYER}shared_mlp.input_linear.weight": ((2 * SHARED, D), "blk.0.ffn_up_shexp.weight"),
    f"{LAYER}shared_mlp.output_linear.weight": ((D, SHARED), "blk.0.ffn_down_shexp.weight"),
}
OLD = {"router": "router.layer", "experts.gate_up_proj": "input_linear.weight"}
OLD |= {"experts.down_proj": "output_linear.weight"}


def moved(name: str, values: np.ndarray) -> np.ndarray:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return values.reshape(-1, 2, HEAD // 2, D).swapaxes(1, 2).reshape(values.shape)
    return values


def dense(layers: int) -> dict:
    """The names of a model without experts."""
    parts = {"mlp.gate_proj": (FF, D), "mlp.up_proj": (FF, D), "mlp.down_proj": (D, FF)}
    names = {name: NAMES[name][0] for name in NAMES if MOE not in name and "shared" not in name}
    names |= {f"{LAYER}{part}.weight": shape for part, shape in parts.items()}
    of_layer = {name: shape for name, shape in names.items() if name.startswith(LAYER)}
    for layer in range(1, layers):
        names |= {name.replace(".0.", f".{layer}."): shape for name, shape in of_layer.items()}
    return names


def test_experts_and_a_shared_one(tmp_path):
    stored = write(tmp_path, MOE_CLASS, CONFIG, shapes_of(NAMES))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, moved=moved)
    keys = keys_of(metadata, "granite_swa")
    assert keys["expert_count"] == EXPERTS and keys["expert_used_count"] == 2
    assert keys["expert_shared_feed_forward_length"] == SHARED
    assert keys["attention.sliding_window"] == 9
    assert keys["attention.sliding_window_pattern"] == [True]
    assert "attention.rope_pattern" not in keys
    assert keys["embedding_scale"] == FACTORS["embedding_multiplier"]


def test_the_names_of_older_checkpoints(tmp_path):
    names = dict(NAMES)
    for new, old in OLD.items():
        name = next(name for name in NAMES if f"{MOE}{new}" in name)
        names[name.replace(new, old)] = names.pop(name)
    stored = write(tmp_path, MOE_CLASS, CONFIG, shapes_of(names))
    check_tensors(convert(tmp_path)[0], stored, names, moved=moved)


@pytest.mark.parametrize("name", [name for name in NAMES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, MOE_CLASS, CONFIG, shapes_of(NAMES), name)


def test_missing_experts_are_named(tmp_path):
    name, words = f"{MOE}experts.gate_up_proj", "layer 0 lacks experts: "
    check_missing(tmp_path, MOE_CLASS, CONFIG, shapes_of(NAMES), name, words)


def test_layers_without_a_rotation(tmp_path):
    """Their base is 0; the class takes the other bases instead of rope_theta."""
    config = FACTORS | {"num_hidden_layers": 5, "layer_rope_theta": [5e4, 0, 5e4, 5e4, 0]}
    write(tmp_path, CLASS, config | {"no_rope_layers": [1, 0, 1, 1, 0]}, dense(5))
    made, metadata = convert(tmp_path)
    assert len(made) == len(dense(5))
    keys = keys_of(metadata, "granite_swa")
    assert keys["attention.rope_pattern"] == [True, False, True, True, False]
    assert keys["attention.sliding_window_pattern"] == [False, True, True, True, False]
    assert keys["attention.sliding_window"] == 128
    assert keys["rope.freq_base"] == 5e4
    assert not any("expert" in key for key in keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [NEAR, FAR]}, "'layer_types' must name"),
        ({"layer_types": ["chunked_attention"]}, "'layer_types' must name"),
        ({"layer_rope_theta": [1e4, 1e4]}, "'layer_rope_theta' must be a list of 1 numbers"),
        ({"layer_rope_theta": [-1]}, "'layer_rope_theta' must be a list of 1 numbers"),
        ({"no_rope_layers": [0]}, "'no_rope_layers' and 'layer_rope_theta' differ"),
        ({"num_hidden_layers": 2, "layer_rope_theta": [1e4, 5e4]}, "has 10000, 50000; GGUF's"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, FACTORS | change, dense(1))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_no_window_is_refused(tmp_path):
    write(tmp_path, CLASS, FACTORS, dense(1))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": None}))
    with pytest.raises(ConfigError, match="'sliding_window' is null"):
        convert(tmp_path)
