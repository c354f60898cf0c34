"""Gemma 3n from checkpoints made here, with the keys of published configs and of newer ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from iqforge.convert.metadata.deviations import deviations
from iqforge.convert.tensors.rows import PaddedRows
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.gguf.reader import open_gguf

from .family_checkpoint import FF, HEAD, HEADS, KV, KV_HEADS, SANDWICH, VOCAB, D, Q, convert, write

CLASS = "Gemma3nForCausalLM"
ATTENTION = {
    "self_attn.q_proj.weight": ((Q, D), "attn_q"),
    "self_attn.k_proj.weight": ((KV, D), "attn_k"),
    "self_attn.v_proj.weight": ((KV, D), "attn_v"),
    "self_attn.o_proj.weight": ((D, Q), "attn_output"),
    "self_attn.q_norm.weight": ((HEAD,), "attn_q_norm"),
    "self_attn.k_norm.weight": ((HEAD,), "attn_k_norm"),
}
LAYERS, INPUTS, RANK, KNOWN = 4, 8, 6, 300  # KNOWN: tokens that have inputs of layers
WIDTHS = [FF, FF, 2 * FF, FF]
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CONFIG = {  # as published
    "num_hidden_layers": LAYERS,
    "intermediate_size": WIDTHS,
    "layer_types": KINDS,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 5000.0,
    "rope_scaling": None,
    "sliding_window": 8,
    "final_logit_softcapping": 20.0,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": INPUTS,
    "vocab_size_per_layer_input": KNOWN,
    "laurel_rank": RANK,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_coef_clip": 120.0,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
}
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "model.per_layer_model_projection.weight": (
        (LAYERS * INPUTS, D),
        "per_layer_model_proj.weight",
    ),
    "model.per_layer_projection_norm.weight": ((INPUTS,), "per_layer_proj_norm.weight"),
}
for _layer in range(LAYERS):
    for _name, (_shape, _to) in {
        **SANDWICH,
        **ATTENTION,
        "mlp.gate_proj.weight": ((WIDTHS[_layer], D), "ffn_gate"),
        "mlp.up_proj.weight": ((WIDTHS[_layer], D), "ffn_up"),
        "mlp.down_proj.weight": ((D, WIDTHS[_layer]), "ffn_down"),
        "per_layer_input_gate.weight": ((INPUTS, D), "inp_gate"),
        "per_layer_projection.weight": ((D, INPUTS), "proj"),
        "post_per_layer_input_norm.weight": ((D,), "post_norm"),
        "altup.correct_output_scale": ((D,), "altup_correct_scale"),
        "altup.correction_coefs.weight": ((4, 4), "altup_correct_coef"),
        "altup.prediction_coefs.weight": ((16, 4), "altup_predict_coef"),
        "altup.modality_router.weight": ((4, D), "altup_router"),
        "altup.router_norm.weight": ((D,), "altup_router_norm"),
        "laurel.linear_left.weight": ((RANK, D), "laurel_l"),
        "laurel.linear_right.weight": ((D, RANK), "laurel_r"),
        "laurel.post_laurel_norm.weight": ((D,), "laurel_post_norm"),
    }.items():
        NAMES[f"model.layers.{_layer}.{_name}"] = _shape, f"blk.{_layer}.{_to}.weight"
SHARED = tuple(
    f"model.layers.{layer}.self_attn.{name}.weight"
    for layer in (2, 3)
    for name in ("k_proj", "v_proj", "k_norm")
)
STREAMS = {
    f"model.altup_{name}.{i}.weight": (D, D)
    for name in ("projections", "unembed_projections")
    for i in range(3)
}
TABLE = {"model.embed_tokens_per_layer.weight": (KNOWN, LAYERS * INPUTS)}
SHAPES = {name: shape for name, (shape, _) in NAMES.items()} | STREAMS | TABLE


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    for name, gguf in (("projections", "altup_proj"), ("unembed_projections", "altup_unembd_proj")):
        parts = [stored[f"model.altup_{name}.{i}.weight"] for i in range(3)]
        assert np.array_equal(made.pop(f"{gguf}.weight"), np.stack(parts))
    table = made.pop("per_layer_token_embd.weight")
    assert np.array_equal(table[:KNOWN], stored["model.embed_tokens_per_layer.weight"])
    assert table.shape == (VOCAB, LAYERS * INPUTS) and not table[KNOWN:].any()
    assert set(made) == {gguf for _, gguf in NAMES.values()}
    for name, (_, gguf) in NAMES.items():
        assert np.array_equal(made[gguf], stored[name]), name
    keys = {k.removeprefix("gemma3n."): v for k, v in metadata.items() if k.startswith("gemma3n.")}
    cutoffs = keys.pop("activation_sparsity_scale")
    assert cutoffs == [np.float32(1.6448536), 0.0, -math.inf, -math.inf]
    assert keys == {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": WIDTHS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 5000.0,
        "final_logit_softcapping": 20.0,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.shared_kv_layers": 2,
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "embedding_length_per_layer_input": INPUTS,
    }


def test_newer_configs_and_checkpoints(tmp_path):
    """Frequencies by kinds of layers, and no keys where nothing reads them."""
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    }
    config = CONFIG | {"rope_parameters": ropes, "rope_local_base_freq": None}
    write(tmp_path, CLASS, config, {x: s for x, s in SHAPES.items() if x not in SHARED})
    made, metadata = convert(tmp_path)
    assert metadata["gemma3n.rope.freq_base"] == 2e6
    assert metadata["gemma3n.rope.freq_base_swa"] == 3e3
    assert not {NAMES[name][1] for name in SHARED} & set(made)


def test_defaults_of_the_class(tmp_path):
    """Every fifth layer has no window, and the first ten of more layers are sparse."""
    n, absent = 12, ("layer_types", "activation_sparsity_pattern", "final_logit_softcapping")
    config = CONFIG | {"num_hidden_layers": n, "intermediate_size": FF} | dict.fromkeys(absent)
    shapes = dict(SHAPES) | {"model.embed_tokens_per_layer.weight": (KNOWN, n * INPUTS)}
    shapes["model.per_layer_model_projection.weight"] = (n * INPUTS, D)
    layer = {x: s for x, s in SHAPES.items() if x.startswith("model.layers.0.")}
    shapes = {x: s for x, s in shapes.items() if not x.startswith("model.layers.")}
    for number in range(n):
        shapes |= {x.replace(".0.", f".{number}.", 1): s for x, s in layer.items()}
    write(tmp_path, CLASS, config, shapes)
    _, metadata = convert(tmp_path)
    assert metadata["gemma3n.feed_forward_length"] == FF
    assert metadata["gemma3n.final_logit_softcapping"] == 30.0
    near = metadata["gemma3n.attention.sliding_window_pattern"]
    assert [layer for layer in range(n) if not near[layer]] == [4, 9]
    cutoffs = metadata["gemma3n.activation_sparsity_scale"]
    assert cutoffs == [deviations(0.95)] * 10 + [-math.inf] * 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"altup_num_inputs": 3}, "'altup_num_inputs' is 3; GGUF's gemma3n implies 4"),
        ({"altup_active_idx": 1}, "'altup_active_idx' is 1; GGUF's gemma3n implies 0"),
        ({"altup_correct_scale": False}, "altup_correct_scale"),
        ({"hidden_activation": "silu"}, "implies gelu_pytorch_tanh"),
        ({"layer_types": KINDS[:3]}, "layer_types"),
        ({"layer_types": ["x"] * 4}, "layer_types"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 3}, "leaves no layer of some kind"),
        ({"intermediate_size": WIDTHS[:3]}, "a positive width for each of 4 layers"),
        ({"intermediate_size": [0, *WIDTHS[1:]]}, "a positive width for each of 4 layers"),
        ({"activation_sparsity_pattern": [0.5] * 3}, "from 0 to below 1 for each of 4 layers"),
        ({"activation_sparsity_pattern": [1.0] * 4}, "from 0 to below 1 for each of 4 layers"),
        ({"activation_sparsity_pattern": [1 - 1e-10] * 4}, "from 0 to below 1 for each of 4"),
        ({"activation_sparsity_pattern": 0.5}, "from 0 to below 1 for each of 4 layers"),
        ({"vocab_size_per_layer_input": VOCAB + 1}, "vocab_size_per_layer_input"),
    ],
)
def test_settings_that_are_refused(tmp_path, change, words):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path)


@pytest.mark.parametrize("name", [x for x in SHAPES if "layers" not in x or "layers.1" in x])
def test_tensors_that_are_missing(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError, match=f"{name.removesuffix('.weight')}.*is missing"):
        convert(tmp_path)


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("model.altup_projections.3.weight", (D, D), "is number 3, but config.json implies 3"),
        ("model.altup_projections.0.weight", (D, D + 1), "config.json implies"),
        ("model.embed_tokens_per_layer.weight", (VOCAB, LAYERS * INPUTS), "config.json implies"),
        (SHARED[0], (KV + 1, D), "config.json implies"),
        ("model.layers.0.self_attn.q_proj.weight", (Q + 1, D), "config.json implies"),
    ],
)
def test_wrong_tensors(tmp_path, name, shape, words):
    write(tmp_path, CLASS, CONFIG, SHAPES | {name: shape})
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)


def test_types_are_those_of_the_reference(tmp_path):
    """Coefficients of streams stay in single precision; other matrices of theirs do not."""
    import iqforge

    write(tmp_path, CLASS, CONFIG, SHAPES)
    path = iqforge.convert_model(tmp_path, tmp_path / "bf16.gguf", "bf16")
    with open_gguf(path) as file:
        types = {t.name: t.type.name for t in file.tensors if t.name.startswith(("altup", "blk.0"))}
    assert {types[f"blk.0.altup_{x}.weight"] for x in ("predict_coef", "correct_coef")} == {"F32"}
    assert types["blk.0.altup_correct_scale.weight"] == types["blk.0.post_norm.weight"] == "F32"
    halves = "altup_proj", "altup_unembd_proj", "blk.0.altup_router", "blk.0.laurel_l", "blk.0.proj"
    assert {types[f"{name}.weight"] for name in halves} == {"BF16"}


class Rows:
    """Rows of ones."""

    n_rows, row_bytes = 5, 4

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ones((stop - start, self.row_bytes), np.uint8)

    def release(self) -> None:
        pass


@pytest.mark.parametrize("start, stop", [(0, 5), (2, 4), (3, 8), (5, 9), (7, 7), (0, 9)])
def test_rows_that_are_padded(start, stop):
    found = PaddedRows(Rows(), 9).read(start, stop)
    assert found.shape == (stop - start, 4)
    assert found.any(1).tolist() == [row < 5 for row in range(start, stop)]


def test_no_limit_of_logits_is_refused(tmp_path):
    write(tmp_path, CLASS, CONFIG, SHAPES)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"final_logit_softcapping": None}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'final_logit_softcapping' is null"):
        convert(tmp_path)
