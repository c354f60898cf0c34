"""OLMo 3: which layers have the window, and what llama.cpp makes of it; OLMo 2 and
OLMoE.
"""

from __future__ import annotations

import json

import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import (
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV,
    KV_HEADS,
    LAYER,
    D,
    Q,
    convert,
    full_names,
    split_as,
    write,
)
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

LOCAL, GLOBAL = "sliding_attention", "full_attention"
CONFIG = {"num_hidden_layers": 5, "tie_word_embeddings": False, "head_dim": None}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}


def keys(folder, config: dict, hf_class: str = "Olmo3ForCausalLM") -> dict:
    write(folder, hf_class, CONFIG | config, {})
    _, metadata = convert(folder, vocab_only=True)
    return {key.removeprefix("olmo2."): value for key, value in metadata.items()}


@pytest.mark.parametrize(
    "kinds, expected",
    [(None, "LLLGL"), ([LOCAL] * 3 + [GLOBAL, LOCAL], "LLLGL"), ([GLOBAL] + [LOCAL] * 4, "GLLLL")],
)
def test_layers_with_a_window(tmp_path, caplog, kinds, expected):
    found = keys(tmp_path, {"layer_types": kinds})
    assert found["attention.sliding_window"] == 4096
    local = found["attention.sliding_window_pattern"]
    assert "".join("L" if x else "G" for x in local) == expected
    assert ("full attention in other layers" in caplog.text) == (expected != "LLLGL")


@pytest.mark.parametrize(
    "config, bases, told",
    [
        ({"rope_theta": 7e4, "rope_scaling": YARN}, (7e4, 7e4), False),
        (
            {
                "rope_theta": None,
                "rope_parameters": {
                    GLOBAL: YARN | {"rope_theta": 7e4},
                    LOCAL: {"rope_type": "default", "rope_theta": 300.0},
                },
            },
            (7e4, 300),
            True,
        ),
    ],
    ids=["as published", "of transformers 5"],
)
def test_frequencies_are_scaled_in_global_layers_alone(tmp_path, caplog, config, bases, told):
    found = keys(tmp_path, config)
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == bases
    assert found["rope.scaling.type"] == "yarn" and found["rope.scaling.factor"] == 8
    assert ("rotary bases of two kinds" in caplog.text) == told


def test_a_window_that_is_null_is_refused(tmp_path):
    keys(tmp_path, {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": None}))
    with pytest.raises(ConfigError, match="'sliding_window' is null"):
        convert(tmp_path, vocab_only=True)


def test_olmo_2_has_no_window(tmp_path, caplog):
    found = keys(tmp_path, {"sliding_window": 8, "head_dim": None}, "Olmo2ForCausalLM")
    assert not [key for key in found if "sliding" in key or "swa" in key or "key_length" in key]
    assert not caplog.text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tie_word_embeddings": True}, "with no output matrix of its own"),
        ({"head_dim": HEAD}, "with heads of another size"),
    ],
)
def test_files_that_others_refuse_are_announced(tmp_path, caplog, change, words):
    keys(tmp_path, change, "Olmo2ForCausalLM")
    assert words in caplog.text


def test_the_pre_tokenizer_has_the_name_that_llama_cpp_gives_it(tmp_path):
    """GLM-4's splits by the same regex."""
    keys(tmp_path, {})
    split_as(tmp_path, "glm4")
    for pre, name in ((None, "dbrx"), ("glm4", "glm4")):
        assert convert(tmp_path, vocab_only=True, pre=pre)[1]["tokenizer.ggml.pre"] == name


OLMOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
OLMOE_NAMES = full_names(
    {
        "input_layernorm.weight": ((D,), "attn_norm"),
        "post_attention_layernorm.weight": ((D,), "ffn_norm"),
        "self_attn.q_proj.weight": ((Q, D), "attn_q"),
        "self_attn.k_proj.weight": ((KV, D), "attn_k"),
        "self_attn.v_proj.weight": ((KV, D), "attn_v"),
        "self_attn.o_proj.weight": ((D, Q), "attn_output"),
        "self_attn.q_norm.weight": ((Q,), "attn_q_norm"),
        "self_attn.k_norm.weight": ((KV,), "attn_k_norm"),
        "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp"),
    }
)
PARTS = {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}
STACKS = expert_stacks(LAYER + "mlp.experts.{expert}.{part}_proj.weight", PARTS, [0])
OLMOE_SHAPES = shapes_of(OLMOE_NAMES, STACKS)


def test_names_values_and_keys_of_olmoe(tmp_path):
    stored = write(tmp_path, "OlmoeForCausalLM", OLMOE | {"rms_norm_eps": None}, OLMOE_SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, OLMOE_NAMES, STACKS)
    assert keys_of(metadata, "olmoe") == {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "rope.freq_base": 1e4,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
    }


@pytest.mark.parametrize("name", OLMOE_NAMES)
def test_a_missing_tensor_of_olmoe_is_named(tmp_path, name):
    check_missing(tmp_path, "OlmoeForCausalLM", OLMOE, OLMOE_SHAPES, name)


@pytest.mark.parametrize("whole", [False, True])
def test_files_of_olmoe_that_others_refuse_are_announced(tmp_path, caplog, whole):
    """Fewer key-value heads, and a tied output matrix."""
    config = {"num_key_value_heads": HEADS, "tie_word_embeddings": False} if whole else {}
    write(tmp_path, "OlmoeForCausalLM", OLMOE | config, {})
    convert(tmp_path, vocab_only=True)
    assert caplog.text.count("llama.cpp refuses GGUF's olmoe") == (0 if whole else 2)
