"""Step-3.5-Flash: a dense layer without a window, one with a window and experts, and a block that
predicts further tokens, from a checkpoint made here. The reference in plain torch is that of
transformers' Step 3.7.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, f32, u32

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV_HEADS, VOCAB, D, convert, write
from .random_models import Models, logits_of
from .tiny_cases import CASES, SIZES
from .tiny_model import write_gguf
from .tiny_models import make_tiny_model

CLASS, OF_EXPERT, SHARED, NEAR_HEADS, NEAR_KV_HEADS = "Step3p5ForCausalLM", 24, 40, 6, 3
NEAR, FAR = "sliding_attention", "full_attention"
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
    "num_attention_groups": KV_HEADS,
    "attention_other_setting": {
        "attention_type": NEAR,
        "num_attention_heads": NEAR_HEADS,
        "num_attention_groups": NEAR_KV_HEADS,
        "head_dim": HEAD,
        "true_head_dim": HEAD,
    },
    "layer_types": [FAR, NEAR, NEAR],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "rope_theta": [5e6, 1e4, 1e4],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": [FAR],
    "sliding_window": 16,
    "moe_layers_enum": "1",
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_intermediate_size": OF_EXPERT,
    "share_expert_dim": SHARED,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "num_nextn_predict_layers": 1,
    "swiglu_limits": [None, 7.0],
    "swiglu_limits_shared": [0.0, 16.0, 0.0],
}
# stored name -> (shape, GGUF name, what is added)
NAMES: dict[str, tuple[tuple[int, ...], str, int]] = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight", 0),
    "model.norm.weight": ((D,), "output_norm.weight", 1),
    "lm_head.weight": ((VOCAB, D), "output.weight", 0),
    "model.layers.1.moe.router_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias", 0),
    "model.layers.1.moe.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight", 0),
}
for _layer in range(3):
    _heads, _kv = (HEADS, KV_HEADS) if _layer == 0 else (NEAR_HEADS, NEAR_KV_HEADS)
    for _name, _shape, _to, _more in (
        ("input_layernorm", (D,), "attn_norm", 1),
        ("post_attention_layernorm", (D,), "ffn_norm", 1),
        ("self_attn.q_proj", (_heads * HEAD, D), "attn_q", 0),
        ("self_attn.k_proj", (_kv * HEAD, D), "attn_k", 0),
        ("self_attn.v_proj", (_kv * HEAD, D), "attn_v", 0),
        ("self_attn.g_proj", (_heads, D), "attn_gate", 0),
        ("self_attn.o_proj", (D, _heads * HEAD), "attn_output", 0),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm", 1),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm", 1),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight", _more
for _stem, _to, _ff, _stack in (
    ("0.mlp.{}_proj", "0.ffn_{}", FF, ()),
    ("2.mlp.{}_proj", "2.ffn_{}", FF, ()),
    ("1.share_expert.{}_proj", "1.ffn_{}_shexp", SHARED, ()),
    ("1.moe.{}_proj", "1.ffn_{}_exps", OF_EXPERT, (EXPERTS,)),
):
    for _part, _shape in (("gate", (_ff, D)), ("up", (_ff, D)), ("down", (D, _ff))):
        _name, _gguf = (x.format(_part) for x in (_stem, _to))
        NAMES[f"model.layers.{_name}.weight"] = (*_stack, *_shape), f"blk.{_gguf}.weight", 0
for _name, _shape, _to, _more in (
    ("eh_proj", (D, 2 * D), "eh_proj", 0),
    ("enorm", (D,), "enorm", 1),
    ("hnorm", (D,), "hnorm", 1),
    ("transformer.shared_head.norm", (D,), "shared_head_norm", 1),
    ("transformer.shared_head.output", (VOCAB, D), "shared_head_head", 0),
):
    NAMES[f"model.layers.2.{_name}.weight"] = _shape, f"blk.2.nextn.{_to}.weight", _more
SHAPES = {name: shape for name, (shape, *_) in NAMES.items()}


def check_values(made, stored, skipped: str = "-") -> None:
    expected = {
        gguf: stored[name] + np.float32(more)
        for name, (_, gguf, more) in NAMES.items()
        if skipped not in name
    }
    assert set(made) == {*expected, "rope_freqs.weight"}
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name


def keys_of(metadata) -> dict:
    return {k.removeprefix("step35."): v for k, v in metadata.items() if k.startswith("step35.")}


@pytest.mark.parametrize("n", [2, 3])
def test_names_values_and_keys(tmp_path, n):
    """With the block that predicts further tokens, and without."""
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path, mtp="keep" if n == 3 else "drop")
    check_values(made, stored, "-" if n == 3 else ".2.")
    factors = made["rope_freqs.weight"]  # of the slower half of the pairs of half a head
    assert factors.shape == (HEAD // 2,) and (factors[HEAD // 4 :] == 1).all()
    assert factors[0] > 1 and (np.diff(factors[: HEAD // 4]) >= 0).all() and factors.max() == 2
    limits = [7.0], [16.0]
    assert keys_of(metadata) == {
        "block_count": n,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": [HEADS, NEAR_HEADS, NEAR_HEADS][:n],
        "attention.head_count_kv": [KV_HEADS, NEAR_KV_HEADS, NEAR_KV_HEADS][:n],
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [False, True, True][:n],
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": OF_EXPERT,
        "expert_shared_feed_forward_length": SHARED,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 3.0,
        "leading_dense_block_count": 1,
        "moe_every_n_layers": 1,
        "swiglu_clamp_exp": [0.0, *limits[0], 0.0][:n],
        "swiglu_clamp_shexp": [0.0, *limits[1], 0.0][:n],
        **({"nextn_predict_layers": 1} if n == 3 else {}),
    }


def test_one_base_without_limits_and_scaling(tmp_path):
    change = {"rope_theta": 1e4, "rope_scaling": None, "yarn_only_types": None}
    change |= {"swiglu_limits": None, "swiglu_limits_shared": None}
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    made, metadata = convert(tmp_path)
    keys = keys_of(metadata)
    assert "rope_freqs.weight" not in made and keys["rope.freq_base"] == 1e4
    assert not [key for key in keys if "swa" in key or "clamp" in key]


def test_merged_gate_and_up(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, _ = convert(tmp_path, merge_gate_up=True)
    gate, up = (stored[f"model.layers.1.moe.{part}_proj.weight"] for part in ("gate", "up"))
    assert np.array_equal(made["blk.1.ffn_gate_up_exps.weight"], np.concatenate([gate, up], axis=1))
    assert not {"blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"} & set(made)


def test_the_text_model_of_step_3_7(tmp_path):
    """Its config has a `text_config`; tensors of the vision tower are left out."""
    others = {"vision_model.conv1.weight": (4, 3), "vit_large_projector.weight": (D, 4)}
    stored = write(tmp_path, "Step3p7ForConditionalGeneration", CONFIG, SHAPES | others)
    file = tmp_path / "config.json"
    keys = json.loads(file.read_text())
    outer = {key: keys.pop(key) for key in ("architectures", "model_type")}
    file.write_text(json.dumps(outer | {"text_config": keys}))
    made, metadata = convert(tmp_path)
    check_values(made, stored)
    assert metadata["general.architecture"] == "step35"


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path)
    part = name.partition("moe.")[2].removesuffix("_proj.weight")
    expected = (
        f"no {part} projection" if part in ("gate", "up", "down") else f"'{name}': is missing"
    )
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_other_setting": {"num_attention_heads": 5}}, "5 is not a multiple of .* 2"),
        ({"attention_other_setting": {"head_dim": 8}}, "key 'head_dim' is 8"),
        ({"attention_other_setting": {"attention_type": FAR}}, f"implies {NEAR}"),
        ({"layer_types": [FAR]}, "'layer_types' must be a list .* 2 layers"),
        ({"layer_types": [FAR, "x", NEAR]}, "layer 1 has 'x'"),
        ({"partial_rotary_factors": None}, "'partial_rotary_factors' must be a list"),
        ({"partial_rotary_factors": [0.5, 0.5, 1.0]}, "layer 1 has .* 0.5 in"),
        ({"rope_theta": [5e6, 1e4, 2e4]}, f"10000 and 20000 in layers with {NEAR}"),
        ({"rope_theta": [5e6, "x", 1e4]}, "'rope_theta' is \"x\""),
        ({"yarn_only_types": None}, "'yarn_only_types'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"moe_layers_enum": None}, "'moe_layers_enum' is missing"),
        ({"moe_layers_enum": "1,2"}, "'moe_layers_enum' is '1,2'"),
        ({"moe_router_activation": "softmax"}, "implies sigmoid"),
        ({"moe_top_k": 4}, "'moe_top_k' is 4"),
        ({"zero_centered": False}, "'zero_centered' is false"),
        ({"use_qk_norm": False}, "'use_qk_norm' is false"),
        ({"sink": True}, "'sink' is true"),
        ({"norm_expert_weight": None}, "'norm_expert_weight' is missing"),
        ({"swiglu_limits": [0.0, -1.0, 0.0]}, "'swiglu_limits' has -1.0 for layer 1"),
        ({"swiglu_limits_shared": ["x", 0.0]}, "'swiglu_limits_shared' has 'x' for layer 0"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


@pytest.mark.parametrize("size", SIZES.values(), ids=lambda size: size.name)
def test_the_reference_is_transformers(tmp_path, size):
    """With the weights of a tiny model, and the names of transformers' class."""
    from safetensors.torch import load_file
    from transformers import Step3p7TextConfig, Step3p7TextModel

    tiny = make_tiny_model(CASES["step35"], size, tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    model = Step3p7TextModel(Step3p7TextConfig(**keys, attn_implementation="eager")).float().eval()
    tensors = {}
    stored = load_file(tmp_path / "model.safetensors")
    for name, values in stored.items():
        name = name.removeprefix("model.").replace(".moe.gate.weight", ".mlp.gate.weight")
        name = name.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias")
        name = name.replace(".moe.down_proj.weight", ".mlp.experts.down_proj")
        name = name.replace(".share_expert.", ".mlp.shared_experts.")
        if ".moe.gate_proj" in name:
            up = stored["model." + name.replace("gate_proj", "up_proj")]
            name, values = (
                name.replace("moe.gate_proj.weight", "mlp.experts.gate_up_proj"),
                torch.cat([values, up], dim=1),
            )
        tensors[name] = values
    head = tensors.pop("lm_head.weight")
    wanted = {name for name in tensors if ".moe.up_proj" not in name}
    model.load_state_dict({name: tensors[name] for name in wanted})
    with torch.no_grad():
        found = model(torch.tensor([tiny.tokens]), use_cache=False).last_hidden_state[0] @ head.T
    assert np.abs(found.numpy() - tiny.logits).max() < 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("step35"))


def changed_logits(models, path, keys: dict) -> np.ndarray:
    """Return the logits of the small model with other keys in its file; None removes one."""
    changed = {f"step35.{key}": value for key, value in keys.items()}
    with open_gguf(models.file("step35", "small")) as source:
        return logits_of(write_gguf(path, source, metadata=changed), models.tiny("step35", "small"))


def test_a_file_with_a_block_that_predicts_further_tokens_runs(models, tmp_path):
    tiny, file = models.tiny("step35", "small"), models.file("step35", "small")
    with open_gguf(file) as source:
        found = {k.removeprefix("step35."): v for k, v in source.metadata.items()}
    n, keys = found["block_count"].data, {}
    for key, type, further in (
        ("attention.head_count", ValueType.INT32, 4),
        ("attention.head_count_kv", ValueType.INT32, 2),
        ("attention.sliding_window_pattern", ValueType.BOOL, False),
        ("swiglu_clamp_exp", ValueType.FLOAT32, 0.0),
        ("swiglu_clamp_shexp", ValueType.FLOAT32, 0.0),
    ):
        keys[key] = array(type, [*found[key].data, further])
    keys |= {"block_count": u32(n + 1), "nextn_predict_layers": u32(1)}
    logits = changed_logits(models, tmp_path / "x.gguf", keys)
    assert np.array_equal(logits, models.logits(file, tiny))


def test_limits_of_a_file(models, tmp_path):
    """One for all layers counts as much as a list; none, or one that nothing reaches, is another
    model; lists of another length are refused.
    """
    as_it_is = changed_logits(models, tmp_path / "0.gguf", {})
    listed, once, without, high = (
        changed_logits(
            models, tmp_path / f"{i}.gguf", {"swiglu_clamp_exp": v, "swiglu_clamp_shexp": v}
        )
        for i, v in enumerate((array(ValueType.FLOAT32, [0.5] * 5), f32(0.5), None, f32(1e9)))
    )
    assert np.array_equal(listed, once) and not np.array_equal(listed, as_it_is)
    assert np.array_equal(without, high) and not np.array_equal(without, as_it_is)
    for wrong in ([0.5] * 4, [0.5, 0.5, 0.5, 0.5, -1.0]):
        limits = {"swiglu_clamp_exp": array(ValueType.FLOAT32, wrong)}
        with pytest.raises(ConfigError, match="swiglu_clamp_exp' has . items"):
            changed_logits(models, tmp_path / "wrong.gguf", limits)
