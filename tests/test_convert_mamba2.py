"""Models of Mamba-2 alone, from checkpoints made here, in both forms that are published."""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge.errors import ArchitectureError, ConfigError

from .family_checkpoint import D, convert, write
from .family_checks import check_missing, keys_of, shapes_of

HEADS, HEAD, STATE, GROUPS, VOCAB = 4, 16, 10, 2, 304
INNER, CHANNELS = 2 * D, 2 * D + 2 * GROUPS * STATE
MIXER = {
    "in_proj.weight": ((INNER + CHANNELS + HEADS, D), "ssm_in.weight"),
    "conv1d.weight": ((CHANNELS, 1, 4), "ssm_conv1d.weight"),
    "conv1d.bias": ((CHANNELS,), "ssm_conv1d.bias"),
    "dt_bias": ((HEADS,), "ssm_dt.bias"),
    "A_log": ((HEADS,), "ssm_a"),
    "D": ((HEADS,), "ssm_d"),
    "norm.weight": ((INNER,), "ssm_norm.weight"),
    "out_proj.weight": ((D, INNER), "ssm_out.weight"),
}
LAYER = "backbone.layers.0."
TABLE = {
    "backbone.embeddings.weight": ((VOCAB, D), "token_embd.weight"),
    "backbone.norm_f.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    f"{LAYER}norm.weight": ((D,), "blk.0.attn_norm.weight"),
    **{f"{LAYER}mixer.{name}": (shape, f"blk.0.{gguf}") for name, (shape, gguf) in MIXER.items()},
}
SHAPES = shapes_of(TABLE)
CONFIG = {
    "vocab_size": VOCAB,
    "num_heads": HEADS,
    "head_dim": HEAD,
    "state_size": STATE,
    "n_groups": GROUPS,
    "layer_norm_epsilon": 1e-4,
    "tie_word_embeddings": False,
    # What transformers has for attention, it has not for this class.
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size")),
    **dict.fromkeys(("max_position_embeddings", "rope_theta", "rms_norm_eps")),
}
HF_CLASS = "Mamba2ForCausalLM"


def check(made: dict[str, np.ndarray], stored: dict[str, np.ndarray], names: dict) -> None:
    assert made.keys() == {gguf for _, gguf in names.values()}
    for name, (_, gguf) in names.items():
        values = stored[name]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        assert np.array_equal(made[gguf].ravel(), values.ravel()), name


@pytest.mark.parametrize("prefix", ["", "model."])
def test_codestral(tmp_path, prefix):
    table = {prefix + name: row for name, row in TABLE.items()}
    stored = write(tmp_path, HF_CLASS, CONFIG, shapes_of(table))
    made, metadata = convert(tmp_path)
    check(made, stored, table)
    assert made["blk.0.ssm_norm.weight"].shape == (GROUPS, INNER // GROUPS)
    assert made["blk.0.ssm_a"].shape == made["blk.0.ssm_d"].shape == (HEADS, 1)
    assert keys_of(metadata, "mamba2") == {
        "context_length": 1 << 20,
        "embedding_length": D,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": 1,
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE,
        "ssm.group_count": GROUPS,
        "ssm.inner_size": INNER,
        "ssm.time_step_rank": HEADS,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-4),
    }


# As mamba2-130m and larger ones are published: without the name of a class.
PUBLISHED = {
    "d_model": D,
    "d_intermediate": 0,
    "n_layer": 1,
    "vocab_size": VOCAB - 5,
    "ssm_cfg": {"layer": "Mamba2", "headdim": HEAD, "d_state": STATE},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def publish(folder, config=PUBLISHED, ssm=None, groups=1):
    """Write a checkpoint as the first code does, whose embedding has rows up to a multiple."""
    channels = INNER + 2 * groups * STATE
    sizes = {"in_proj.weight": (INNER + channels + HEADS, D), "conv1d.weight": (channels, 1, 4)}
    sizes |= {"conv1d.bias": (channels,)}
    table = {
        name.replace("embeddings", "embedding"): (sizes.get(name.split("mixer.")[-1], shape), gguf)
        for name, (shape, gguf) in TABLE.items()
        if name != "lm_head.weight"
    }
    stored = write(folder, HF_CLASS, {}, shapes_of(table))
    config = config | {"ssm_cfg": config["ssm_cfg"] | (ssm or {})}
    (folder / "config.json").write_text(json.dumps(config))
    return stored, table


@pytest.mark.parametrize("groups", [1, 2])
def test_the_first_code(tmp_path, groups):
    stored, table = publish(
        tmp_path, ssm={"ngroups": groups} if groups > 1 else None, groups=groups
    )
    made, metadata = convert(tmp_path)
    check(made, stored, table)
    assert metadata["mamba2.ssm.group_count"] == groups
    assert metadata["mamba2.ssm.time_step_rank"] == HEADS
    assert len(metadata["tokenizer.ggml.tokens"]) == VOCAB


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, HF_CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_heads": 3}, "3 heads of Mamba layers with 16 elements are not 64 elements, 2 times"),
        ({"head_dim": 24}, "4 heads of Mamba layers with 24 elements are not 64"),
        ({"n_groups": 3}, "4 heads of Mamba layers are not a multiple of 3 groups"),
        ({"use_bias": True}, "'use_bias' is true; GGUF's mamba2 implies false"),
        ({"rms_norm": False}, "'rms_norm' is false"),
        ({"hidden_act": "gelu"}, "GGUF's mamba2 implies silu"),
        ({"time_step_limit": [0.0, 0.1]}, "no limits of steps"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, HF_CLASS, CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


@pytest.mark.parametrize(
    "outer, inner, words",
    [
        ({"attn_layer_idx": [0]}, {}, "'attn_layer_idx' names layers with attention"),
        ({"d_intermediate": 8}, {}, "'d_intermediate' is 8"),
        ({}, {"D_has_hdim": True}, "'ssm_cfg.D_has_hdim' is true|'D_has_hdim' is true"),
        ({}, {"rmsnorm": False}, "'rmsnorm' is false"),
        ({}, {"norm_before_gate": True}, "'norm_before_gate' is true"),
        ({}, {"dt_limit": [0.0, 0.1]}, "no limits of steps"),
        ({}, {"bias": True}, "'use_bias' is true"),
    ],
)
def test_refused_of_the_first_code(tmp_path, outer, inner, words):
    publish(tmp_path, PUBLISHED | outer, inner)
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_mamba_1_is_named(tmp_path):
    publish(tmp_path, ssm={"layer": "Mamba1"})
    with pytest.raises(ArchitectureError, match="'Mamba1ForCausalLM' is not supported yet"):
        convert(tmp_path, vocab_only=True)
