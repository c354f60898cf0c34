"""InternLM2, from a checkpoint made here: rows of the joined matrix, and its vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.values import Value

from .family_checkpoint import FF, HEADS, KV_HEADS, VOCAB, D, convert, write
from .sentencepiece_models import trained_model

CLASS, SIZE = "InternLM2ForCausalLM", D // HEADS
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "head_dim": None,
    "tie_word_embeddings": False,
    "bias": False,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
# stored name -> (shape, GGUF name)
NAMES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.tok_embeddings.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "output.weight": ((VOCAB, D), "output.weight"),
}
for _layer in range(2):
    for _name, _shape, _to in (
        ("attention_norm", (D,), "attn_norm"),
        ("ffn_norm", (D,), "ffn_norm"),
        ("attention.wo", (D, D), "attn_output"),
        ("feed_forward.w1", (FF, D), "ffn_gate"),
        ("feed_forward.w2", (D, FF), "ffn_down"),
        ("feed_forward.w3", (FF, D), "ffn_up"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
JOINED = "model.layers.{}.attention.wqkv.weight"
SHAPES = {name: shape for name, (shape, _) in NAMES.items()} | {
    JOINED.format(layer): ((HEADS + 2 * KV_HEADS) * SIZE, D) for layer in range(2)
}


def paired(heads: np.ndarray) -> np.ndarray:
    """Return rows of heads [n, SIZE, D] with rotary partners side by side: [n * SIZE, D]."""
    halves = heads.reshape(len(heads), 2, SIZE // 2, D)
    return halves.transpose(0, 2, 1, 3).reshape(-1, D)


def test_names_values_and_keys(tmp_path, caplog):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    assert "texts of more than 64 tokens" in caplog.text
    expected = {gguf: stored[name] for name, (_, gguf) in NAMES.items()}
    for layer in range(2):
        heads = stored[JOINED.format(layer)].reshape(KV_HEADS, HEADS // KV_HEADS + 2, SIZE, D)
        queries, keys, values = heads[:, :-2], heads[:, -2], heads[:, -1]
        expected |= {
            f"blk.{layer}.attn_q.weight": paired(queries.reshape(HEADS, SIZE, D)),
            f"blk.{layer}.attn_k.weight": paired(keys),
            f"blk.{layer}.attn_v.weight": values.reshape(-1, D),
        }
    assert set(made) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(made[name], values), name
    prefix = "internlm2."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    assert keys == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
    }


def test_linear_scaling_has_keys(tmp_path):
    change = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    metadata = convert(tmp_path)[1]
    found = [metadata[f"internlm2.rope.scaling.{key}"] for key in ("type", "factor")]
    assert found == ["linear", 4.0]


@pytest.mark.parametrize("name", [name for name in SHAPES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, CLASS, CONFIG, {x: shape for x, shape in SHAPES.items() if x != name})
    with pytest.raises(CheckpointError) as raised:
        convert(tmp_path)
    assert f"'{name}': is missing" in str(raised.value)


def test_a_joined_matrix_of_another_shape_is_refused(tmp_path):
    write(tmp_path, CLASS, CONFIG, SHAPES | {JOINED.format(1): (3 * D, D)})
    with pytest.raises(CheckpointError, match=r"layers.1.attention.wqkv"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": True}, "'bias' is true"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"hidden_act": "gelu"}, "implies silu"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_vocabulary(tmp_path, prefix):
    """Pieces that are kept for later use, and the token that ends a turn of a chat."""
    model = trained_model(
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        user_defined_symbols=["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"],
    )
    write(tmp_path, CLASS, CONFIG | {"vocab_size": 380}, {})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model)
    added = {"4": "[UNUSED_TOKEN_2]", "379": "<|im_end|>"}
    decoder = {number: {"content": text, "special": True} for number, text in added.items()}
    config = {"added_tokens_decoder": decoder, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    metadata = convert(tmp_path, vocab_only=True)[1]
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if "ggml" in k}
    assert (keys["model"], keys["pre"]) == ("llama", "default")
    assert keys["tokens"][3:5] == ["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"]
    assert keys["token_type"][3:5] == [5, 3]  # unused, and a control token
    assert keys["eos_token_id"] == 379 and keys["add_space_prefix"] is prefix


def test_a_zero_byte_has_a_text(tmp_path, monkeypatch):
    """Runtimes take it for an empty one."""
    from iqforge.convert.architectures import family_metadata

    real = family_metadata.vocabulary_metadata

    def with_zero(*arguments) -> dict[str, Value]:
        keys = real(*arguments)
        keys["tokenizer.ggml.tokens"].data[7] = "\0"
        return keys

    write(tmp_path, CLASS, CONFIG, {})
    before = convert(tmp_path, vocab_only=True)[1]["tokenizer.ggml.tokens"]
    monkeypatch.setattr(family_metadata, "vocabulary_metadata", with_zero)
    after = convert(tmp_path, vocab_only=True)[1]["tokenizer.ggml.tokens"]
    assert after[7] == "\U0001f409" and [*after[:7], *after[8:]] == [*before[:7], *before[8:]]
