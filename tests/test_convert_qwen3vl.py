"""Qwen3-VL, text only, from checkpoints made here with tensors of a vision model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import EXPERTS, FF, HEAD, KV, VOCAB, D, Q, convert, write
from .tiny_checkpoint import write_safetensors

DENSE, SPARSE, OF_EXPERT = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    24,
)
SECTIONS = [4, 2, 2]
TEXT = {  # as published
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": SECTIONS,
    },
}
OF_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": OF_EXPERT,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
VISION = {"deepstack_visual_indexes": [8, 16, 24]}
OTHERS = {"model.visual.patch_embed.proj.weight": (4, 3), "model.visual.merger.norm.weight": (4,)}
LAYER = "model.language_model.layers.0."
# stored name -> (shape, GGUF name)
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.language_model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.language_model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}
for _name, _shape, _to in (
    ("input_layernorm", (D,), "attn_norm"),
    ("post_attention_layernorm", (D,), "ffn_norm"),
    ("self_attn.q_proj", (Q, D), "attn_q"),
    ("self_attn.k_proj", (KV, D), "attn_k"),
    ("self_attn.v_proj", (KV, D), "attn_v"),
    ("self_attn.o_proj", (D, Q), "attn_output"),
    ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
    ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
):
    NAMES[f"{LAYER}{_name}.weight"] = _shape, f"blk.0.{_to}.weight"
MLP = {
    f"{LAYER}mlp.{part}_proj.weight": (shape, f"blk.0.ffn_{part}.weight")
    for part, shape in (("gate", (FF, D)), ("up", (FF, D)), ("down", (D, FF)))
}
ROUTER = {f"{LAYER}mlp.gate.weight": ((EXPERTS, D), "blk.0.ffn_gate_inp.weight")}
GATE_UP, DOWN = f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj"
TRANSPOSED = {GATE_UP: (EXPERTS, D, 2 * OF_EXPERT), DOWN: (EXPERTS, OF_EXPERT, D)}


def write_vl(folder: Path, hf_class: str, text: dict, shapes: dict) -> dict[str, np.ndarray]:
    """Write a checkpoint whose config has sections for text and images."""
    stored = write(folder, hf_class, text, shapes | OTHERS)
    file = folder / "config.json"
    keys = json.loads(file.read_text())
    outer = {key: keys.pop(key) for key in ("architectures", "model_type")}
    outer |= {"text_config": keys, "vision_config": VISION}
    file.write_text(json.dumps(outer))
    return stored


def shapes_of(names: dict) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in names.items()}


def check(made, stored, names, more=()) -> None:
    expected = {gguf: stored[name] for name, (_, gguf) in names.items()} | dict(more)
    assert set(made) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name


def check_keys(metadata, name: str) -> None:
    assert metadata["general.architecture"] == name
    assert metadata[f"{name}.rope.dimension_sections"] == [*SECTIONS, 0]
    assert metadata[f"{name}.n_deepstack_layers"] == 3


def test_without_experts(tmp_path):
    names = NAMES | MLP
    stored = write_vl(tmp_path, DENSE, TEXT, shapes_of(names))
    made, metadata = convert(tmp_path)
    check(made, stored, names)
    check_keys(metadata, "qwen3vl")


@pytest.mark.parametrize("transposed", [True, False])
def test_with_experts(tmp_path, transposed):
    """As published, and as transformers 5 saves them."""
    names = NAMES | ROUTER
    stored = write_vl(tmp_path, SPARSE, TEXT | OF_EXPERTS, shapes_of(names) | TRANSPOSED)
    usual = {name: np.ascontiguousarray(stored[name].swapaxes(1, 2)) for name in TRANSPOSED}
    if not transposed:
        write_safetensors(tmp_path / "model.safetensors", stored | usual)
    made, metadata = convert(tmp_path)
    gate, up = np.split(usual[GATE_UP], 2, axis=1)
    parts = {"gate": gate, "up": up, "down": usual[DOWN]}
    check(made, stored, names, ((f"blk.0.ffn_{x}_exps.weight", y) for x, y in parts.items()))
    check_keys(metadata, "qwen3vlmoe")
    assert metadata["qwen3vlmoe.expert_feed_forward_length"] == OF_EXPERT
    merged, _ = convert(tmp_path, merge_gate_up=True)
    assert np.array_equal(merged["blk.0.ffn_gate_up_exps.weight"], usual[GATE_UP])


def test_experts_one_by_one(tmp_path):
    """As in FP8 checkpoints."""
    shapes = {
        f"{LAYER}mlp.experts.{x}.{part}_proj.weight": shape
        for x in range(EXPERTS)
        for part, shape in (
            ("gate", (OF_EXPERT, D)),
            ("up", (OF_EXPERT, D)),
            ("down", (D, OF_EXPERT)),
        )
    }
    names = NAMES | ROUTER
    stored = write_vl(tmp_path, SPARSE, TEXT | OF_EXPERTS, shapes_of(names) | shapes)
    made, _ = convert(tmp_path)
    stem = f"{LAYER}mlp.experts.{{}}.up_proj.weight"
    expected = np.stack([stored[stem.format(x)] for x in range(EXPERTS)])
    assert np.array_equal(made["blk.0.ffn_up_exps.weight"], expected)


@pytest.mark.parametrize("name", [*ROUTER, GATE_UP, DOWN])
def test_a_missing_tensor_is_named(tmp_path, name):
    shapes = shapes_of(NAMES | ROUTER) | TRANSPOSED
    del shapes[name]
    write_vl(tmp_path, SPARSE, TEXT | OF_EXPERTS, shapes)
    with pytest.raises(CheckpointError, match=r"layer 0 lacks experts|mlp\.gate\.weight"):
        convert(tmp_path)


def test_experts_of_another_shape_are_refused(tmp_path):
    shapes = shapes_of(NAMES | ROUTER) | TRANSPOSED | {GATE_UP: (EXPERTS, D, OF_EXPERT)}
    write_vl(tmp_path, SPARSE, TEXT | OF_EXPERTS, shapes)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*has shape"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mrope_section": [4, 2, 1]}, r"'mrope_section' is \[4, 2, 1\], expected .* 8 in a head"),
        ({"mrope_section": [4, 4]}, r"'mrope_section' is \[4, 4\]"),
        ({"mrope_section": [-2, 5, 5]}, r"'mrope_section' is \[-2, 5, 5\]"),
        ({"mrope_interleaved": False}, "'mrope_interleaved' is false"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    text = TEXT | {"rope_scaling": TEXT["rope_scaling"] | change}
    write_vl(tmp_path, DENSE, text, shapes_of(NAMES | MLP))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)
