"""Nemotron-H and Nemotron 3: a layer of each kind, and a block that predicts further tokens, from a
checkpoint made here.
"""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError, UsageError
from iqforge.formats.values import boolean, f32

from .family_checkpoint import EXPERTS, FF, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of
from .random_models import Models

CLASS = "NemotronHForCausalLM"
WIDE, SHARED, LATENT = 20, 40, 24
M_HEADS, M_HEAD, STATE, GROUPS = 6, 4, 10, 2
INNER = M_HEADS * M_HEAD
CHANNELS = INNER + 2 * GROUPS * STATE
CONFIG = {
    "hybrid_override_pattern": "M-*",
    "num_hidden_layers": 3,
    "rms_norm_eps": None,
    "rope_theta": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "mamba_num_heads": M_HEADS,
    "mamba_head_dim": M_HEAD,
    "ssm_state_size": STATE,
    "n_groups": GROUPS,
    "conv_kernel": 4,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}
SPARSE = CONFIG | {
    "hybrid_override_pattern": None,
    "layers_block_type": ["mamba", "moe", "attention"],
    "intermediate_size": None,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "moe_shared_expert_intermediate_size": SHARED,
    "moe_latent_size": LATENT,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
# stored name -> (shape, GGUF name)
ENDS = {
    "embeddings.weight": ((VOCAB, D), "token_embd.weight"),
    "norm_f.weight": ((D,), "output_norm.weight"),
}
MAMBA = {
    "norm.weight": ((D,), "attn_norm.weight"),
    "mixer.in_proj.weight": ((INNER + CHANNELS + M_HEADS, D), "ssm_in.weight"),
    "mixer.conv1d.weight": ((CHANNELS, 1, 4), "ssm_conv1d.weight"),
    "mixer.conv1d.bias": ((CHANNELS,), "ssm_conv1d.bias"),
    "mixer.dt_bias": ((M_HEADS,), "ssm_dt.bias"),
    "mixer.A_log": ((M_HEADS,), "ssm_a"),
    "mixer.D": ((M_HEADS,), "ssm_d"),
    "mixer.norm.weight": ((INNER,), "ssm_norm.weight"),
    "mixer.out_proj.weight": ((D, INNER), "ssm_out.weight"),
}
ATTENTION = {
    "norm.weight": ((D,), "attn_norm.weight"),
    "mixer.q_proj.weight": ((Q, D), "attn_q.weight"),
    "mixer.k_proj.weight": ((KV, D), "attn_k.weight"),
    "mixer.v_proj.weight": ((KV, D), "attn_v.weight"),
    "mixer.o_proj.weight": ((D, Q), "attn_output.weight"),
}
DENSE = {
    "norm.weight": ((D,), "attn_norm.weight"),
    "mixer.up_proj.weight": ((FF, D), "ffn_up.weight"),
    "mixer.down_proj.weight": ((D, FF), "ffn_down.weight"),
}
ROUTED = {
    "norm.weight": ((D,), "attn_norm.weight"),
    "mixer.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "mixer.gate.e_score_correction_bias": ((EXPERTS,), "exp_probs_b.bias"),
    "mixer.shared_experts.up_proj.weight": ((SHARED, D), "ffn_up_shexp.weight"),
    "mixer.shared_experts.down_proj.weight": ((D, SHARED), "ffn_down_shexp.weight"),
    "mixer.fc1_latent_proj.weight": ((LATENT, D), "ffn_latent_down.weight"),
    "mixer.fc2_latent_proj.weight": ((D, LATENT), "ffn_latent_up.weight"),
}
FURTHER = {
    "mtp.layers.0.enorm.weight": ((D,), "nextn.enorm.weight"),
    "mtp.layers.0.hnorm.weight": ((D,), "nextn.hnorm.weight"),
    "mtp.layers.0.eh_proj.weight": ((D, 2 * D), "nextn.eh_proj.weight"),
    "mtp.layers.1.final_layernorm.weight": ((D,), "nextn.shared_head_norm.weight"),
}
PARTS = {"up": (WIDE, LATENT), "down": (LATENT, WIDE)}


def named(*layers: dict) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {stored name: (shape, GGUF name)} of a model of these layers."""
    found = {f"backbone.{name}": line for name, line in ENDS.items()}
    found["lm_head.weight"] = ((VOCAB, D), "output.weight")
    for number, layer in enumerate(layers):
        for name, (shape, gguf) in layer.items():
            found[f"backbone.layers.{number}.{name}"] = shape, f"blk.{number}.{gguf}"
    return found


def moved(name: str, values: np.ndarray) -> np.ndarray:
    """Return what becomes of a stored tensor."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):  # halves of heads become pairs
        heads = HEADS if "q_proj" in name else KV_HEADS
        return values.reshape(heads, 2, -1, D).swapaxes(1, 2).reshape(values.shape)
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)[:, None]
    if name.endswith("mixer.D"):
        return values[:, None]
    if name.endswith("mixer.norm.weight"):
        return values.reshape(GROUPS, -1)
    return values[:, 0] if name.endswith("conv1d.weight") else values


COMMON = {
    "context_length": 1 << 20,
    "embedding_length": D,
    "attention.head_count": HEADS,
    "attention.layer_norm_epsilon": pytest.approx(1e-5),
    "attention.key_length": 16,
    "attention.value_length": 16,
    "vocab_size": VOCAB,
    "rope.dimension_count": D // HEADS,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.state_size": STATE,
    "ssm.group_count": GROUPS,
    "ssm.inner_size": INNER,
    "ssm.time_step_rank": M_HEADS,
}


def test_layers_of_each_kind(tmp_path):
    names = named(MAMBA, DENSE, ATTENTION)
    stored = write(tmp_path, CLASS, CONFIG, shapes_of(names))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, moved=moved)
    assert keys_of(metadata, "nemotron_h") == COMMON | {
        "block_count": 3,
        "feed_forward_length": [0, FF, 0],
        "attention.head_count_kv": [0, 0, KV_HEADS],
    }


def test_experts_and_a_block_that_predicts_further_tokens(tmp_path):
    """The block is stored as two, of attention and of experts."""
    names = named(MAMBA, ROUTED, ATTENTION)
    for number, layer in enumerate((ATTENTION, ROUTED)):
        for name, (shape, gguf) in layer.items():
            second = number and name == "norm.weight"
            own = "post_attention_norm.weight" if second else gguf
            names[f"mtp.layers.{number}.{name}"] = shape, f"blk.3.{own}"
    names |= {name: (shape, f"blk.3.{gguf}") for name, (shape, gguf) in FURTHER.items()}
    one = "layers.1.mixer.experts.{expert}.{part}_proj.weight"
    stacks = expert_stacks(f"backbone.{one}", PARTS, [1]) | expert_stacks(f"mtp.{one}", PARTS, [3])
    stored = write(tmp_path, CLASS, SPARSE, shapes_of(names, stacks))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, stacks, moved)
    assert keys_of(metadata, "nemotron_h_moe") == COMMON | {
        "block_count": 4,
        "feed_forward_length": [0, WIDE, 0, WIDE],
        "attention.head_count_kv": [0, 0, KV_HEADS, KV_HEADS],
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_feed_forward_length": WIDE,
        "expert_shared_feed_forward_length": SHARED,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "moe_latent_size": LATENT,
        "nextn_predict_layers": 1,
    }
    without, metadata = convert(tmp_path, mtp="drop")
    assert set(without) == {name for name in made if not name.startswith("blk.3.")}
    assert metadata["nemotron_h_moe.feed_forward_length"] == [0, WIDE, 0]


@pytest.mark.parametrize("name", [name for name in named(MAMBA, DENSE, ATTENTION) if "0" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    words = f"'{name.replace('backbone', 'model')}': is missing"
    check_missing(tmp_path, CLASS, CONFIG, shapes_of(named(MAMBA, DENSE, ATTENTION)), name, words)


def test_keys_of_older_configs(tmp_path):
    change = {"head_dim": None, "attention_head_dim": 8, "num_hidden_layers": None}
    more = {"norm_eps": 1e-5, "rope_theta": 1e4, "use_conv_bias": False}
    write(tmp_path, CLASS, CONFIG | change | more, {})
    keys = keys_of(convert(tmp_path, vocab_only=True)[1], "nemotron_h")
    assert keys["attention.key_length"] == 8 and keys["block_count"] == 3
    assert keys["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert keys["rope.freq_base"] == 1e4


@pytest.mark.parametrize(
    "config, words",
    [
        (CONFIG | {"hybrid_override_pattern": "MX*"}, r"'X', expected one of M, \*, -, E$"),
        (CONFIG | {"intermediate_size": None}, "key 'intermediate_size' is missing"),
        (CONFIG | {"hybrid_override_pattern": None}, "neither 'hybrid_override_pattern' nor"),
        (CONFIG | {"num_hidden_layers": 4}, "is 4, and 3 layers are described"),
        (SPARSE | {"layers_block_type": ["mlp", "moe", "mamba"]}, "GGUF's nemotron_h_moe has eith"),
        (CONFIG | {"mlp_hidden_act": "silu"}, "'silu'; GGUF's nemotron_h implies relu2"),
        (CONFIG | {"mamba_hidden_act": "gelu"}, "implies silu"),
        (CONFIG | {"use_bias": True}, "'use_bias' is true"),
        (SPARSE | {"mlp_bias": True}, "'mlp_bias' is true"),
        (CONFIG | {"time_step_limit": [0.0, 0.1]}, "no limits of steps"),
        (CONFIG | {"n_groups": 4}, "6 heads of Mamba layers are not a multiple of 4 groups"),
        (CONFIG | {"norm_eps": 1e-6}, "'norm_eps' and 'layer_norm_epsilon' differ"),
        (SPARSE | {"num_nextn_predict_layers": 2}, "has one block"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path, config, words):
    write(tmp_path, CLASS, config, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)


def test_there_are_no_gates_to_merge(tmp_path):
    write(tmp_path, CLASS, SPARSE, {})
    with pytest.raises(UsageError, match="no experts whose gate and up"):
        convert(tmp_path, vocab_only=True, merge_gate_up=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("nemotron"))


def test_the_epsilon_of_rms_norms_comes_first(models, tmp_path):
    """Of two in a file."""
    rms, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    both = {rms: f32(0.5), other: f32(1e-5)}
    found = models.changed_logits("nemotron_h_moe", tmp_path / "both.gguf", both)
    for name, keys in (("rms", {rms: f32(0.5), other: None}), ("other", {other: f32(0.5)})):
        assert np.array_equal(
            models.changed_logits("nemotron_h_moe", tmp_path / f"{name}.gguf", keys), found
        )
    assert np.abs(found - models.tiny("nemotron_h_moe", "small").logits).max() > 1e-3


def test_scores_of_experts_are_not_normed_without_a_key(models, tmp_path):
    """As in llama.cpp."""
    key = "expert_weights_norm"
    without, on, off = (
        models.changed_logits("nemotron_h_moe", tmp_path / f"{number}.gguf", {key: value})
        for number, value in enumerate((None, boolean(True), boolean(False)))
    )
    assert np.array_equal(without, off) and not np.array_equal(without, on)
