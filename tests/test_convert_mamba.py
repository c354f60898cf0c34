"""Models of the first Mamba, and Falcon-Mamba, from checkpoints made here."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import D, convert, write
from .family_checks import check_missing, check_tensors, keys_of, shapes_of

STATE, RANK, VOCAB, INNER = 10, 2, 304, 2 * D
MIXER = {
    "in_proj.weight": ((2 * INNER, D), "ssm_in.weight"),
    "conv1d.weight": ((INNER, 1, 4), "ssm_conv1d.weight"),
    "conv1d.bias": ((INNER,), "ssm_conv1d.bias"),
    "x_proj.weight": ((RANK + 2 * STATE, INNER), "ssm_x.weight"),
    "dt_proj.weight": ((INNER, RANK), "ssm_dt.weight"),
    "dt_proj.bias": ((INNER,), "ssm_dt.bias"),
    "A_log": ((INNER, STATE), "ssm_a"),
    "D": ((INNER,), "ssm_d"),
    "out_proj.weight": ((D, INNER), "ssm_out.weight"),
}
LAYER = "backbone.layers.0."
NAMES = {
    "backbone.embeddings.weight": ((VOCAB, D), "token_embd.weight"),
    "backbone.norm_f.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    f"{LAYER}norm.weight": ((D,), "blk.0.attn_norm.weight"),
    **{f"{LAYER}mixer.{name}": (shape, f"blk.0.{gguf}") for name, (shape, gguf) in MIXER.items()},
}
SHAPES = shapes_of(NAMES)
CONFIG = {
    "vocab_size": VOCAB,
    "state_size": STATE,
    "layer_norm_epsilon": 1e-4,
    "tie_word_embeddings": False,
    # What transformers has for other layers, it has not for these classes.
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size")),
    **dict.fromkeys(("max_position_embeddings", "rope_theta", "rms_norm_eps", "head_dim")),
}
CLASSES = ["MambaForCausalLM", "FalconMambaForCausalLM"]


def moved(name: str, values: np.ndarray) -> np.ndarray:
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    return values[:, 0] if name.endswith("conv1d.weight") else values


@pytest.mark.parametrize("hf_class", CLASSES)
def test_names_values_and_keys(tmp_path, hf_class):
    stored = write(tmp_path, hf_class, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, moved=moved)
    assert keys_of(metadata, "mamba") == {
        "context_length": 1 << 20,
        "embedding_length": D,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": 1,
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE,
        "ssm.inner_size": INNER,
        "ssm.time_step_rank": RANK,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-4),
        "ssm.dt_b_c_rms": hf_class.startswith("Falcon"),
    }


def test_tied_and_padded(tmp_path):
    """A rank of its own, and more rows of the embedding than tokens."""
    names = {name: found for name, found in NAMES.items() if not name.startswith("lm_head")}
    names[f"{LAYER}mixer.x_proj.weight"] = (5 + 2 * STATE, INNER), "blk.0.ssm_x.weight"
    names[f"{LAYER}mixer.dt_proj.weight"] = (INNER, 5), "blk.0.ssm_dt.weight"
    more = {"vocab_size": VOCAB - 3, "pad_vocab_size_multiple": 8, "time_step_rank": 5}
    config = CONFIG | more | {"tie_word_embeddings": None}
    stored = write(tmp_path, CLASSES[0], config, shapes_of(names))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, moved=moved)
    assert metadata["mamba.ssm.time_step_rank"] == 5
    assert len(metadata["tokenizer.ggml.tokens"]) == VOCAB


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASSES[0], CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expand": 3}, "layers have 96 channels; GGUF's mamba implies twice hidden_size 32"),
        ({"intermediate_size": 48}, "layers have 48 channels"),
        ({"use_bias": True}, "'use_bias' is true"),
        ({"use_conv_bias": False}, "'use_conv_bias' is false"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"mixer_rms_eps": 1e-5}, "'mixer_rms_eps' is 1e-05"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASSES[1], CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)
