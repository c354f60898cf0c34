"""Falcon-H1 from checkpoints made here: its factors are in the matrices."""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
from iqforge.errors import ConfigError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf

from .family_checkpoint import FF, HEAD, HEADS, KV, KV_HEADS, LAYER, VOCAB, D, Q, convert, write
from .family_checks import check_missing, keys_of
from .tiny_cases_falcon_h1 import MULTIPLIERS
from .tiny_checkpoint import write_safetensors

MAMBA_HEADS, MAMBA_HEAD, STATE, GROUPS = 6, 8, 10, 2
INNER, VECTORS = MAMBA_HEADS * MAMBA_HEAD, GROUPS * STATE
CHANNELS = INNER + 2 * VECTORS
CONFIG = MULTIPLIERS | {
    "mamba_d_ssm": INNER,
    "mamba_n_heads": MAMBA_HEADS,
    "mamba_d_head": MAMBA_HEAD,
    "mamba_d_state": STATE,
    "mamba_n_groups": GROUPS,
    "mamba_rms_norm": False,
    "tie_word_embeddings": False,
}
M = {name: np.float32(x) for name, x in MULTIPLIERS.items() if not isinstance(x, list)}
GATE, DOWN = (np.float32(x) for x in MULTIPLIERS["mlp_multipliers"])
PARTS = np.repeat(
    np.array(MULTIPLIERS["ssm_multipliers"], np.float32),
    [INNER, INNER, VECTORS, VECTORS, MAMBA_HEADS],
)
READ = M["attention_in_multiplier"]
# stored name -> shape, GGUF name, factors in the order in which they are applied
LAYERS = {
    "input_layernorm.weight": ((D,), "attn_norm.weight", ()),
    "pre_ff_layernorm.weight": ((D,), "ffn_norm", ()),
    "self_attn.q_proj.weight": ((Q, D), "attn_q.weight", (READ,)),
    "self_attn.k_proj.weight": ((KV, D), "attn_k.weight", (M["key_multiplier"], READ)),
    "self_attn.v_proj.weight": ((KV, D), "attn_v.weight", (READ,)),
    "self_attn.o_proj.weight": ((D, Q), "attn_output.weight", (M["attention_out_multiplier"],)),
    "mamba.in_proj.weight": (
        (INNER + CHANNELS + MAMBA_HEADS, D),
        "ssm_in.weight",
        (M["ssm_in_multiplier"], PARTS[:, None]),
    ),
    "mamba.conv1d.weight": ((CHANNELS, 1, 4), "ssm_conv1d.weight", ()),
    "mamba.conv1d.bias": ((CHANNELS,), "ssm_conv1d.bias", ()),
    "mamba.dt_bias": ((MAMBA_HEADS,), "ssm_dt.bias", ()),
    "mamba.A_log": ((MAMBA_HEADS,), "ssm_a", ()),
    "mamba.D": ((MAMBA_HEADS,), "ssm_d", ()),
    "mamba.out_proj.weight": ((D, INNER), "ssm_out.weight", (M["ssm_out_multiplier"],)),
    "feed_forward.gate_proj.weight": ((FF, D), "ffn_gate.weight", (GATE,)),
    "feed_forward.up_proj.weight": ((FF, D), "ffn_up.weight", ()),
    "feed_forward.down_proj.weight": ((D, FF), "ffn_down.weight", (DOWN,)),
}
TABLE = {LAYER + name: (shape, f"blk.0.{gguf}", by) for name, (shape, gguf, by) in LAYERS.items()}
TABLE |= {
    "model.embed_tokens.weight": (
        (VOCAB, D),
        "token_embd.weight",
        (M["embedding_multiplier"],),
    ),
    "lm_head.weight": ((VOCAB, D), "output.weight", (M["lm_head_multiplier"],)),
    "model.final_layernorm.weight": ((D,), "output_norm.weight", ()),
}
SHAPES = {name: shape for name, (shape, _, _) in TABLE.items()}


def made_of(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    for name, (_, gguf, factors) in TABLE.items():
        if name not in stored:
            continue
        values = stored[name]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        for factor in factors:
            values = values * factor
        found[gguf] = values
    return found


def check(made: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name].ravel(), values.ravel()), name


def test_factors_are_in_the_matrices(tmp_path):
    stored = write(tmp_path, "FalconH1ForCausalLM", CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check(made, made_of(stored))
    assert made["blk.0.ssm_conv1d.weight"].shape == (CHANNELS, 4)
    sizes = {"conv_kernel": 4, "state_size": STATE, "group_count": GROUPS}
    sizes |= {"inner_size": INNER, "time_step_rank": MAMBA_HEADS}
    keys = {f"ssm.{key}": value for key, value in sizes.items()}
    assert keys_of(metadata, "falcon-h1") == keys | {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "vocab_size": VOCAB,
    }


def test_the_norm_of_groups_is_optional(tmp_path):
    config = CONFIG | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
    name = f"{LAYER}mamba.norm.weight"
    stored = write(tmp_path, "FalconH1ForCausalLM", config, SHAPES | {name: (INNER,)})
    made, _ = convert(tmp_path)
    assert made["blk.0.ssm_norm.weight"].shape == (GROUPS, INNER // GROUPS)
    check(made, made_of(stored) | {"blk.0.ssm_norm.weight": stored[name]})


@pytest.mark.parametrize("factor", [0.5, MULTIPLIERS["embedding_multiplier"]])
def test_a_tied_output_has_its_own_factor(tmp_path, factor):
    """One matrix is enough where it is that of embeddings."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    config = CONFIG | {"tie_word_embeddings": True, "lm_head_multiplier": factor}
    stored = write(tmp_path, "FalconH1ForCausalLM", config, shapes)
    made, _ = convert(tmp_path)
    wanted = made_of(stored)
    if factor == 0.5:
        wanted["output.weight"] = stored["model.embed_tokens.weight"] * np.float32(factor)
    check(made, wanted)


def test_what_a_factor_of_one_leaves_alone_keeps_its_type(tmp_path):
    """Others become float32, so that nothing is rounded twice."""
    config = {key: value for key, value in CONFIG.items() if key not in MULTIPLIERS}
    stored = write(tmp_path, "FalconH1ForCausalLM", config, SHAPES)
    made, _ = convert(tmp_path)
    check(made, made_of(stored) | {TABLE[n][1]: stored[n] for n in stored if "A_log" not in n})


def test_adapters_have_the_factors_too(tmp_path):
    """(B A) times the factors is (B times the factors) A."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    stored = write(base, "FalconH1ForCausalLM", CONFIG, SHAPES)
    adapter.mkdir()
    names = [f"{LAYER}{part}" for part in ("mamba.in_proj", "self_attn.k_proj")]
    random, halves = np.random.default_rng(1), {}
    for name in names:
        n_out, n_in = stored[f"{name}.weight"].shape
        halves[f"base_model.model.{name}.lora_A.weight"] = random.standard_normal((2, n_in))
        halves[f"base_model.model.{name}.lora_B.weight"] = random.standard_normal((n_out, 2))
    halves = {name: values.astype(np.float32) for name, values in halves.items()}
    write_safetensors(adapter / "adapter_model.safetensors", halves)
    settings = {"r": 2, "lora_alpha": 2, "peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with open_gguf(iqforge.convert_lora(adapter, tmp_path / "lora.gguf", "f32")) as file:
        for name in names:
            _, gguf, factors = TABLE[f"{name}.weight"]
            a, b = (
                decode(tensor.type, file.read_rows(tensor, 0, tensor.n_rows), tensor.n_cols)
                for tensor in (file.tensor(f"{gguf}.lora_{half}") for half in "ab")
            )
            assert np.array_equal(a, halves[f"base_model.model.{name}.lora_A.weight"])
            wanted = halves[f"base_model.model.{name}.lora_B.weight"]
            for factor in factors:
                wanted = wanted * factor
            assert np.array_equal(b, wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, "FalconH1ForCausalLM", CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mamba_d_head": 7}, "6 heads of Mamba layers with 7 elements are not 48 elements"),
        ({"mamba_n_groups": 4}, "6 heads of Mamba layers are not a multiple of 4 groups"),
        ({"mamba_rms_norm": True}, "'mamba_norm_before_gate' is missing"),
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "'mamba_norm_before_gate' is true; GGUF's falcon-h1 implies false",
        ),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"mlp_bias": True}, "'mlp_bias' is true"),
        ({"projectors_bias": True}, "'projectors_bias' is true"),
        ({"mamba_proj_bias": True}, "'mamba_proj_bias' is true"),
        ({"mamba_use_mlp": False}, "'mamba_use_mlp' is false"),
        ({"attn_layer_indices": [0]}, "'attn_layer_indices' is set"),
        ({"time_step_limit": [0.001, 0.1]}, "no limits of steps"),
        ({"hidden_act": "gelu"}, "GGUF's falcon-h1 implies silu"),
        ({"mlp_multipliers": [1.0]}, "a list of 2 positive numbers"),
        ({"ssm_multipliers": [1.0] * 4}, "a list of 5 positive numbers"),
        ({"key_multiplier": float("nan")}, "expected a finite number"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, "FalconH1ForCausalLM", CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_sizes_that_the_class_derives(tmp_path):
    """Without `mamba_d_ssm` it is `mamba_expand` times the width."""
    config = CONFIG | {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 4}
    write(tmp_path, "FalconH1ForCausalLM", config, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["falcon-h1.ssm.inner_size"] == 2 * D
    assert metadata["tokenizer.ggml.pre"] == "falcon-h1"
