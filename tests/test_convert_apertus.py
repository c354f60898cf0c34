"""Apertus, whose activation has numbers in every layer, from a checkpoint made here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, f32

from .family_checkpoint import FF, HEAD, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write
from .random_models import Models, logits_of
from .tiny_cases import SMALL
from .tiny_checkpoint import write_safetensors
from .tiny_model import write_gguf

CLASS = "ApertusForCausalLM"
NUMBERS = ("alpha_n", "alpha_p", "beta", "eps")
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "hidden_act": "xielu",
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "post_norm": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
# stored name -> (shape, GGUF name)
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}
for _layer in range(2):
    for _name, _shape, _to in (
        ("attention_layernorm", (D,), "attn_norm"),
        ("feedforward_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
        ("mlp.up_proj", (FF, D), "ffn_up"),
        ("mlp.down_proj", (D, FF), "ffn_down"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
ACTIVATION = {
    f"model.layers.{layer}.mlp.act_fn.{name}": (1,) if "alpha" in name else ()
    for layer in range(2)
    for name in NUMBERS
}
SHAPES = {name: shape for name, (shape, _) in NAMES.items()} | ACTIVATION


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    expected = {gguf: stored[name] for name, (_, gguf) in NAMES.items()}
    assert set(made) == {*expected, "rope_freqs.weight"}
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name
    keys = {k.removeprefix("apertus."): v for k, v in metadata.items() if k.startswith("apertus.")}
    assert keys == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
    }
    numbers = {key: values for key, values in metadata.items() if key.startswith("xielu.")}
    assert numbers == {
        f"xielu.{name}": [
            float(stored[f"model.layers.{layer}.mlp.act_fn.{name}"].item()) for layer in range(2)
        ]
        for name in NUMBERS
    }


def test_frequencies_are_scaled_without_a_key_too(tmp_path):
    """As in transformers' class, which has the scaling of the released models by itself."""
    change = {"rope_scaling": None, "max_position_embeddings": 65536, "rope_theta": 1.2e7}
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    made, _ = convert(tmp_path)
    assert made["rope_freqs.weight"].max() == 8
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    write(tmp_path, CLASS, CONFIG | change | plain, SHAPES)
    assert "rope_freqs.weight" not in convert(tmp_path)[0]


@pytest.mark.parametrize("name", [name for name in SHAPES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path)
    assert f"'{name}': is missing" in str(raised.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [([1.0, 2.0], "expected one number"), (math.inf, "is inf"), (math.nan, "is nan")],
)
def test_a_wrong_number_of_the_activation_is_refused(tmp_path, value, message):
    stored, name = write(tmp_path, CLASS, CONFIG, SHAPES), "model.layers.1.mlp.act_fn.beta"
    wrong = {name: np.array(value, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored | wrong)
    with pytest.raises(CheckpointError, match=message) as raised:
        convert(tmp_path)
    assert name in str(raised.value)
    assert not [key for key in convert(tmp_path, vocab_only=True)[1] if key.startswith("xielu.")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "implies xielu"),
        ({"qk_norm": False}, "'qk_norm' is false"),
        ({"post_norm": True}, "'post_norm' is true"),
        ({"mlp_bias": True}, "'mlp_bias' is true"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("apertus"))


def test_numbers_of_a_file(models, tmp_path):
    """One for all layers counts as much as a list. Files without them, or with a wrong one, are
    refused.
    """

    def logits(name: str, values) -> np.ndarray:
        with open_gguf(models.file("apertus", "small")) as source:
            path = write_gguf(tmp_path / f"{name}.gguf", source, metadata={"xielu.beta": values})
        return logits_of(path, models.tiny("apertus", "small"))

    n = SMALL.layers
    once, listed = logits("once", f32(0.5)), logits("list", array(ValueType.FLOAT32, [0.5] * n))
    other = logits("other", f32(0.75))
    assert np.array_equal(once, listed) and not np.array_equal(once, other)
    for name, wrong in (("short", [0.5] * (n - 1)), ("nan", [math.nan] * n)):
        with pytest.raises(ConfigError, match="'xielu.beta' has . items, expected . finite"):
            logits(name, array(ValueType.FLOAT32, wrong))
    with pytest.raises(ConfigError, match="xielu.beta"):
        logits("none", None)
