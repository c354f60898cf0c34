"""Conversion: the files equal the reference converter's and, for generated checkpoints, what the
layout rules say.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.api import open_source
from iqforge.convert.architectures.registry import architecture_class, register, supported
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.metadata.general import size_label, title
from iqforge.convert.metadata.model_card import model_card_metadata, read_model_card
from iqforge.convert.naming import default_file_name, output_path
from iqforge.convert.source import CheckpointSource
from iqforge.convert.tensors.outtype import plan_outtype
from iqforge.errors import (
    ArchitectureError,
    CheckpointError,
    ConfigError,
    IqforgeError,
    NotFoundError,
    OutputError,
    ShapeError,
    UsageError,
)
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe, write_safetensors

# --- against the reference
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, variant, outtype, merge",
    [
        ("llama", "f32", "f32", False),
        ("llama", "bf16", "bf16", False),
        ("llama", "q8_0", "q8_0", False),
        ("llama31", "f32", "f32", False),
        ("mistral", "f32", "f32", False),
        ("qwen3_moe", "f32", "f32", False),
        ("qwen3_moe", "bf16", "bf16", False),
        ("qwen3_moe", "q8_0", "q8_0", False),
        ("qwen3_moe", "fused-f32", "f32", True),
        ("tok_bpe_added", "f32", "f32", False),
        ("tok_bpe_pairs", "f32", "f32", False),
    ],
)
def test_file_equals_the_reference(
    tmp_path: Path, case: str, variant: str, outtype: str, merge: bool
):
    expected = shared(f"golden/convert/{case}/expected-{variant}.gguf")
    made = iqforge.convert_model(
        shared(f"golden/convert/{case}/hf"),
        tmp_path / "made.gguf",
        outtype,
        merge_gate_up=merge,
        name=f"Golden {case}",
    )
    with open_gguf(made) as ours, open_gguf(expected) as theirs:
        assert ours.metadata == theirs.metadata
        assert set(ours.tensors) == set(theirs.tensors)
    assert made.read_bytes() == expected.read_bytes()  # down to key order, tensor order and padding


def test_fused_q8_0_equals_the_listing(tmp_path: Path):
    listing = json.loads(shared("golden/convert/qwen3_moe/expected-fused-q8_0.json").read_text())
    made = iqforge.convert_model(
        shared("golden/convert/qwen3_moe/hf"),
        tmp_path / "made.gguf",
        "q8_0",
        merge_gate_up=True,
        name="Golden qwen3_moe",
    )
    with open_gguf(made) as file:
        found = [
            (
                t.name,
                t.type.name,
                list(reversed(t.shape)),
                hashlib.sha256(file.read_rows(t, 0, t.n_rows).tobytes()).hexdigest(),
            )
            for t in file.tensors
        ]
    assert found == [(t["name"], t["type"], t["shape"], t["sha256"]) for t in listing["tensors"]]


@pytest.mark.parametrize(
    "model, n_tensors", [("demo-llama", 47), ("mini-llama", 48), ("mini-qwen3moe", 38)]
)
def test_trained_models_convert(tmp_path: Path, model: str, n_tensors: int):
    made = iqforge.convert_model(shared(f"models/{model}"), tmp_path)
    assert made.name.endswith("-BF16.gguf")
    with open_gguf(made) as file:
        assert len(file.tensors) == n_tensors
        assert file.metadata["general.file_type"].data == 32
        assert file.metadata["tokenizer.ggml.pre"].data == "llama-bpe"


@pytest.mark.parametrize("case", ["Tiny-Llama-3-8B-Instruct", "qwen3moe"])
def test_plan_of_the_reference(tmp_path: Path, case: str):
    """Keys, order, shapes and bytes agree for sources filled by a rule. One of them has the key
    `num_experts` and a top-level rope_theta.
    """
    plan = json.loads(shared("golden/tools/convert_plans.json").read_text())[case]
    tensors = {}
    for name, (_, shape) in plan["source"].items():
        flat, seed = np.arange(np.prod(shape), dtype=np.float64), sum(name.encode()) % 251
        tensors[name] = (
            (((7 * flat + 13 * seed) % 251) / 251 - 0.5).astype(np.float32).reshape(shape)
        )
    (tmp_path / "config.json").write_text(json.dumps(plan["config"]))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    converter = architecture_class(checkpoint.architecture)(checkpoint)
    keys = {
        key: value.data for key, value in converter.metadata().items() if key != "general.file_type"
    }
    wanted = {
        key: value for key, (_, value) in plan["keys"].items() if not key.startswith("general.")
    }
    assert list(keys) == list(wanted) and keys == pytest.approx(wanted, rel=1e-6)
    made = {
        t.info.name: (
            t.info.type.name,
            list(reversed(t.info.shape)),
            hashlib.sha256(t.rows.read(0, t.rows.n_rows).tobytes()).hexdigest()[:16],
        )
        for t in converter.tensors()
    }
    assert made == {name: (type, dims, digest) for name, type, dims, digest in plan["tensors"]}
    assert (
        size_label([t.info for t in converter.tensors()]) == plan["keys"]["general.size_label"][1]
    )
    checkpoint.close()


# --- generated checkpoints
# --------------------------------------------------------------------------------------------------


def values(source, name: str) -> np.ndarray:
    """Return float32 of a whole tensor, read in pieces of uneven size."""
    tensor = next(t for t in source.tensors if t.name == name)
    rows = [
        source.read_rows(tensor, start, min(start + 37, tensor.n_rows))
        for start in range(0, tensor.n_rows, 37)
    ]
    return decode(tensor.type, np.concatenate(rows), tensor.n_cols).reshape(tensor.shape)


def stored(folder: Path, name: str) -> np.ndarray:
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors[name]
        raw = checkpoint.data(tensor).reshape(1, -1)
        return (
            decode(checkpoint.type_of(tensor), raw, tensor.n_elements).reshape(tensor.shape).copy()
        )


def test_llama_layout(tmp_path: Path):
    make_tiny_llama(tmp_path, n_heads=4, n_kv_heads=2, shards=3, dtype="f32")
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        for part, heads in (("q", 4), ("k", 2)):
            hf = stored(tmp_path, f"model.layers.1.self_attn.{part}_proj.weight")
            pairs = hf.reshape(heads, 2, 32, 256).swapaxes(1, 2).reshape(heads * 64, 256)
            assert np.array_equal(values(source, f"blk.1.attn_{part}.weight"), pairs)
        for hf_name, name in (
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.down_proj", "ffn_down"),
            ("mlp.gate_proj", "ffn_gate"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            assert np.array_equal(
                values(source, f"blk.0.{name}.weight"),
                stored(tmp_path, f"model.layers.0.{hf_name}.weight"),
            )
        assert source.metadata["llama.rope.dimension_count"].data == 64
        assert len(source.metadata["tokenizer.ggml.tokens"].data) == 320


def test_llama_biases_are_paired_too(tmp_path: Path):
    make_tiny_llama(tmp_path, n_layers=1, dtype="f32", config={"attention_bias": True})
    names = {"q": 256, "k": 128, "v": 128, "o": 256}
    biases = {
        f"model.layers.0.self_attn.{part}_proj.bias": np.arange(size, dtype=np.float32)
        for part, size in names.items()
    }
    with open_checkpoint(tmp_path) as checkpoint:
        whole = {name: stored(tmp_path, name) for name in checkpoint.tensors}
    write_safetensors(tmp_path / "model.safetensors", whole | biases)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert values(source, "blk.0.attn_q.bias")[:4].tolist() == [0, 32, 1, 33]
        assert values(source, "blk.0.attn_v.bias")[:4].tolist() == [0, 1, 2, 3]
        assert {t.name: t.type.name for t in plan_outtype(source, "q8_0")[0]}[
            "blk.0.attn_q.bias"
        ] == "F32"


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_experts(tmp_path: Path, stacked: bool, merge: bool):
    # The experts of a layer are in two shards.
    make_tiny_qwen3moe(tmp_path / "plain", shards=3, seed=5, n_ff_expert=96)
    folder = (
        make_tiny_qwen3moe(tmp_path / "stacked", stacked=True, seed=5, n_ff_expert=96)
        if stacked
        else tmp_path / "plain"
    )
    gate, up, down = (
        np.stack(
            [
                stored(tmp_path / "plain", f"model.layers.1.mlp.experts.{x}.{part}_proj.weight")
                for x in range(4)
            ]
        )
        for part in ("gate", "up", "down")
    )
    with CheckpointSource(open_checkpoint(folder), merge_gate_up=merge) as source:
        names = {t.name for t in source.tensors}
        assert ("blk.1.ffn_gate_up_exps.weight" in names) == merge and (
            "blk.1.ffn_gate_exps.weight" in names
        ) == (not merge)
        assert np.array_equal(values(source, "blk.1.ffn_down_exps.weight"), down)
        if merge:
            assert np.array_equal(
                values(source, "blk.1.ffn_gate_up_exps.weight"), np.concatenate([gate, up], axis=1)
            )
        else:
            assert np.array_equal(values(source, "blk.1.ffn_gate_exps.weight"), gate)
            assert np.array_equal(values(source, "blk.1.ffn_up_exps.weight"), up)
        assert source.metadata["general.size_label"].data.startswith("4x")


def test_tied_embeddings_drop_the_head(tmp_path: Path):
    make_tiny_llama(tmp_path, config={"tie_word_embeddings": True})  # a head is stored all the same
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert "output.weight" not in {t.name for t in source.tensors}


@pytest.mark.parametrize(
    "config, base, extra",
    [
        ({"rope_theta": 5e5}, 5e5, {}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            1e6,
            {},
        ),
        ({"rope_theta": None}, 1e4, {}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            1e4,
            {"type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e6,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                    "beta_fast": 32,
                }
            },
            1e6,
            {"type": "yarn", "factor": 4.0, "original_context_length": 512, "yarn_beta_fast": 32.0},
        ),
    ],
)
def test_rope_in_old_and_new_configs(tmp_path: Path, config: dict, base: float, extra: dict):
    make_tiny_llama(tmp_path, n_layers=1, config=config)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert source.metadata["llama.rope.freq_base"].data == base
        prefix = "llama.rope.scaling."
        assert {
            key.removeprefix(prefix): value.data
            for key, value in source.metadata.items()
            if key.startswith(prefix)
        } == extra


def test_llama3_scaling_becomes_a_tensor(tmp_path: Path):
    scaling = {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    make_tiny_llama(
        tmp_path,
        n_layers=1,
        n_embd=256,
        n_heads=16,
        n_kv_heads=4,
        config={"rope_parameters": scaling},
    )
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert source.tensors[0].name == "rope_freqs.weight"
        assert values(source, "rope_freqs.weight") == pytest.approx(
            [1, 1, 1, 1, 1, 1, 4.681482315063477, 8]
        )


@pytest.mark.parametrize(
    "dtype, outtype, file_type, matrix",
    [
        ("bf16", "auto", 32, "BF16"),
        ("f16", "auto", 1, "F16"),
        ("f32", "auto", 1, "F16"),
        ("bf16", "F32", 0, "F32"),
        ("bf16", "q8_0", 7, "Q8_0"),
    ],
)
def test_outtype(tmp_path: Path, dtype: str, outtype: str, file_type: int, matrix: str):
    make_tiny_qwen3moe(tmp_path, n_layers=1, dtype=dtype, n_ff_expert=48)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        plan, number = plan_outtype(source, outtype)
        types = {t.name: t.type.name for t in plan}
        assert (
            number == file_type and types["blk.0.attn_q.weight"] == types["output.weight"] == matrix
        )
        assert (
            types["blk.0.attn_norm.weight"]
            == types["blk.0.attn_q_norm.weight"]
            == types["blk.0.ffn_gate_inp.weight"]
            == "F32"
        )
        # Rows of 48.
        assert types["blk.0.ffn_down_exps.weight"] == ("F16" if matrix == "Q8_0" else matrix)
        with pytest.raises(UsageError, match="q9"):
            plan_outtype(source, "q9")


# --- what must be refused
# --------------------------------------------------------------------------------------------------


def opened(folder: Path, **options) -> CheckpointSource:
    return CheckpointSource(open_checkpoint(folder), **options)


@pytest.mark.parametrize(
    "config, kind, words",
    [
        ({"hidden_size": None}, ConfigError, "'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers"),
        (
            {"num_hidden_layers": 2**31 - 1},
            CheckpointError,
            "model.layers.2.input_layernorm.weight",
        ),
        ({"num_hidden_layers": 2**31}, ConfigError, "num_hidden_layers"),
        ({"num_hidden_layers": 1}, CheckpointError, "layer 1"),
        ({"num_hidden_layers": "2"}, ConfigError, "num_hidden_layers"),
        ({"num_attention_heads": 3}, ConfigError, "head_dim is missing"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
        ({"num_key_value_heads": 1}, CheckpointError, "k_proj"),
        ({"head_dim": 63}, ConfigError, "odd"),
        ({"intermediate_size": 500}, CheckpointError, "has shape"),
        ({"rms_norm_eps": None}, ConfigError, "'rms_norm_eps' is missing"),
        ({"rms_norm_eps": "1e-5"}, ConfigError, "rms_norm_eps"),
        ({"rope_theta": -1.0}, ConfigError, "rope_theta"),
        ({"rope_theta": 10**400}, ConfigError, "rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, ConfigError, "longrope"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ConfigError,
            "rope_scaling.low_freq_factor",
        ),
        ({"rope_scaling": 3}, ConfigError, "rope_scaling"),
        ({"tie_word_embeddings": "yes"}, ConfigError, "tie_word_embeddings"),
        ({"vocab_size": 321}, CheckpointError, "321"),
        ({"attention_bias": True}, CheckpointError, "q_proj.bias"),
        ({"architectures": ["LlamaForCausalLn"]}, ArchitectureError, "LlamaForCausalLM"),
        ({"architectures": ["T5Model"]}, ArchitectureError, "not supported"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, config: dict, kind: type, words: str):
    make_tiny_llama(tmp_path, config=config)
    with pytest.raises(kind) as raised:
        opened(tmp_path)
    assert words in str(raised.value)


def rewritten(folder: Path, change) -> Path:
    """Return the checkpoint with its tensors changed by `change(dict)`."""
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: stored(folder, name) for name in checkpoint.tensors}
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_tensors_unknown_missing_or_twice(tmp_path: Path):
    make_tiny_llama(tmp_path / "a", n_layers=1)
    rewritten(
        tmp_path / "a",
        lambda t: t.update(
            {"model.layers.0.self_attn.q_projj.weight": np.zeros((2, 2), np.float32)}
        ),
    )
    with pytest.raises(
        CheckpointError,
        match=r"q_projj.*most similar known name is 'model.layers.\{\}.self_attn.q_proj'",
    ):
        opened(tmp_path / "a")
    make_tiny_llama(tmp_path / "b", n_layers=1)
    rewritten(tmp_path / "b", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match="'model.norm.weight': is missing"):
        opened(tmp_path / "b")
    make_tiny_llama(tmp_path / "c", n_layers=1)
    rewritten(
        tmp_path / "c",
        lambda t: t.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
        ),
    )
    opened(tmp_path / "c").close()


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "model.layers.1.mlp.experts.2.up_proj.weight",
            "layer 1 lacks experts: expert 2 has no up projection",
        ),
        (
            "model.layers.0.mlp.experts.3.down_proj.weight",
            "layer 0 lacks experts: expert 3 has no down projection",
        ),
    ],
)
def test_missing_expert(tmp_path: Path, name: str, words: str):
    rewritten(make_tiny_qwen3moe(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as raised:
        opened(tmp_path)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "config, kind, words",
    [
        ({"num_experts": 3}, CheckpointError, "mlp.gate.weight"),
        ({"num_experts": 5}, CheckpointError, "mlp.gate.weight"),
        ({"num_experts": None}, ConfigError, "'num_experts' is missing"),
        ({"num_experts_per_tok": 5}, ConfigError, "num_experts_per_tok"),
        ({"mlp_only_layers": [0]}, ConfigError, "mlp_only_layers"),
        ({"moe_intermediate_size": 255}, CheckpointError, "has shape"),
    ],
)
def test_expert_configs_that_do_not_fit(tmp_path: Path, config: dict, kind: type, words: str):
    make_tiny_qwen3moe(tmp_path, config=config)
    with pytest.raises(kind) as raised:
        opened(tmp_path)
    assert words in str(raised.value)


def test_merging_needs_experts(tmp_path: Path):
    with pytest.raises(UsageError, match="no experts"):
        opened(make_tiny_llama(tmp_path), merge_gate_up=True)


def test_rows_outside_a_tensor(tmp_path: Path):
    with opened(make_tiny_llama(tmp_path)) as source:
        tensor = source.tensors[0]
        with pytest.raises(ShapeError):
            source.read_rows(tensor, 0, tensor.n_rows + 1)
        with pytest.raises(IqforgeError, match="no such tensor"):
            source.read_rows(TensorInfo("nope", (1, 1), TYPES["F32"]), 0, 1)


def test_a_class_is_registered_once():
    with pytest.raises(RuntimeError, match="LlamaForCausalLM"):
        register("LlamaForCausalLM")(object)
    assert {"LlamaForCausalLM", "Qwen3MoeForCausalLM"} <= set(supported())


def test_a_stored_name_has_one_line_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    llama = architecture_class("LlamaForCausalLM")
    lines = llama.weights
    monkeypatch.setattr(
        llama, "weights", lambda self: [*lines(self), replace(lines(self)[1], plus_one=True)]
    )
    with pytest.raises(RuntimeError, match="two rows for 'model.norm'"):
        opened(make_tiny_llama(tmp_path))


# --- names and the command
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, label",
    [
        (86_336, "86K"),
        (8_030_261_248, "8.0B"),
        (30_532_122_624, "31B"),
        (270_000_000, "270M"),
        (1_540_000_000, "1.5B"),
        (9_970_000_000, "10B"),
    ],
)
def test_size_label(count: int, label: str):
    assert size_label([TensorInfo("a.weight", (count,), TYPES["F32"])]) == label


def test_names():
    assert title("tiny-llama-3-8B-v1.5-instruct") == "Tiny Llama 3 8B v1.5 Instruct"
    assert default_file_name("Mini Llama", "20M", "bf16") == "Mini-Llama-20M-BF16.gguf"
    assert (
        default_file_name("Llama 3 8B/Instruct", "8.0B", "q8_0") == "Llama-3-8B-Instruct-Q8_0.gguf"
    )
    assert default_file_name("..", None, "vocab") == "model-vocab.gguf"


def test_output_path(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "tiny-model", n_layers=1)
    with opened(folder) as source:
        label = source.metadata["general.size_label"].data
        assert output_path(source, None, "auto") == folder / f"Tiny-Model-{label}-BF16.gguf"
        assert output_path(source, tmp_path, "q8_0") == tmp_path / f"Tiny-Model-{label}-Q8_0.gguf"
        assert (
            output_path(source, tmp_path / "x-{ftype}-{OUTTYPE}.gguf", "auto")
            == tmp_path / "x-bf16-BF16.gguf"
        )
        with pytest.raises(OutputError, match="does not exist"):
            output_path(source, tmp_path / "absent" / "x.gguf", "auto")
        with pytest.raises(OutputError, match="not a folder"):
            output_path(source, f"{tmp_path}/absent{os.sep}", "auto")


def test_files_of_the_checkpoint_are_not_overwritten(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "m", n_layers=1)
    (tmp_path / "link.gguf").symlink_to(folder / "model.safetensors")
    before = (folder / "model.safetensors").read_bytes()
    for out in (folder / "model.safetensors", folder / "config.json", tmp_path / "link.gguf"):
        with pytest.raises(OutputError):
            iqforge.convert_model(folder, out)
    assert (folder / "model.safetensors").read_bytes() == before
    # An older result in the folder may be replaced.
    assert iqforge.convert_model(folder) == iqforge.convert_model(folder)


def test_name_in_a_download_cache(tmp_path: Path):
    folder = make_tiny_llama(
        tmp_path / "models--acme--tiny-chat" / "snapshots" / "0123abcd", n_layers=1
    )
    with opened(folder) as source:
        assert source.metadata["general.name"].data == "Tiny Chat"


def test_a_gguf_file_is_not_converted(tmp_path: Path):
    made = iqforge.convert_model(make_tiny_llama(tmp_path / "m", n_layers=1), tmp_path / "m.gguf")
    before = made.read_bytes()
    for out in (None, tmp_path / "n.gguf"):
        with pytest.raises(UsageError, match="conversion takes a checkpoint"):
            iqforge.convert_model(made, out)
    assert made.read_bytes() == before and [path.name for path in tmp_path.glob("*.gguf")] == [
        "m.gguf"
    ]


def test_model_card_and_sampling(tmp_path: Path):
    make_tiny_llama(tmp_path, n_layers=1)
    (tmp_path / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\nbase_model: acme/Big-Model\ntags: [a,"
        " 'b']\nmodel_name: Shiny\nmodel-index:\n- name: x\n  results: []\n---\n# text\nlicense:"
        " other\n"
    )
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 20, "top_p": null, "min_p": "x"}'
    )
    with opened(tmp_path) as source:
        data = {
            key: value.data for key, value in source.metadata.items() if key.startswith("general.")
        }
    assert (
        data["general.name"] == "Shiny"
        and data["general.license"] == "apache-2.0"
        and data["general.languages"] == ["en", "de"]
    )
    assert data[
        "general.base_model.0.repo_url"
    ] == "https://huggingface.co/acme/Big-Model" and data["general.tags"] == ["a", "b"]
    assert (
        data["general.sampling.temp"] == 0.5
        and data["general.sampling.top_k"] == 20
        and "general.sampling.min_p" not in data
    )


@pytest.mark.parametrize(
    "front, expected",
    [
        ("language: no\nlicense: 1.0", {"languages": ["no"], "license": "1.0"}),
        ("license: 'mit' # chosen", {"license": "mit"}),
        ("tags:\n  - a\n  - {b: c}\n  - [d]\n  -", {"tags": ["a"]}),
        ("license: >-\n  of two\n  lines", {"license": "of two lines"}),
        ("license: {name: mit}\ntags: 3", {"tags": ["3"]}),
        ("license: !!python/object/apply:os.system [exit]", {"license": "exit"}),
        ("license: [unclosed", {}),
        ("- a list", {}),
        ("a: &a [x, x]\nb: &b [*a, *a]\ntags: [*b, *b]", {}),
        ("[" * 5000, {}),
        ("\x00", {}),
    ],
)
def test_front_matter_of_all_kinds(tmp_path: Path, front: str, expected: dict):
    """Scalars are texts, as written, and a card that is not YAML counts as absent."""
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# text")
    (tmp_path / "config.json").write_text("{}")
    keys = model_card_metadata(read_model_card(open_checkpoint(tmp_path)))
    assert {key: value.data for key, value in keys.items()} == {
        f"general.{key}": value for key, value in expected.items()
    }


@pytest.mark.parametrize(
    "files, words",
    [
        ([], "a checkpoint is a folder with config.json and safetensors files"),
        (["b.gguf", "a.gguf"], "it has a.gguf: name that file"),
        (["adapter_config.json", "adapter_model.safetensors"], "iqforge convert-lora"),
        (["inner/config.json"], "inner inside it has one"),
        (["refs/main", "snapshots/0f/config.json"], "snapshots/0f inside it has one"),
        (["model.safetensors"], "how to read its weights"),
    ],
)
def test_a_folder_without_config_is_described(tmp_path: Path, files: list[str], words: str):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(NotFoundError, match="has no config.json") as raised:
        open_source(tmp_path)
    assert str(tmp_path) in str(raised.value) and words in raised.value.message


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    from iqforge.cli import main

    folder = make_tiny_qwen3moe(tmp_path / "m", n_layers=1)
    out = tmp_path / "out-{ftype}.gguf"
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(out),
                "--outtype",
                "f16",
                "--fuse-gate-up-exps",
                "--dry-run",
            ]
        )
        == 0
    )
    assert "blk.0.ffn_gate_up_exps.weight" in capsys.readouterr().out and not list(
        tmp_path.glob("*.gguf")
    )
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(out),
                "--outtype",
                "f16",
                "--merge-gate-up",
                "--model-name",
                "N",
            ]
        )
        == 0
    )
    with open_gguf(tmp_path / "out-f16.gguf") as file:
        assert file.metadata["general.name"].data == "N" and file.tensor(
            "blk.0.ffn_gate_up_exps.weight"
        ).shape == (4, 512, 256)
    assert main(["convert", str(folder), "--outfile", str(tmp_path), "--pre", "llama_bpe"]) == 1
    assert "did you mean llama-bpe" in capsys.readouterr().err
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(tmp_path / "v.gguf"),
                "--vocab-only",
                "--pre",
                "qwen2",
            ]
        )
        == 0
    )
    with open_gguf(tmp_path / "v.gguf") as file:
        assert (
            not file.tensors
            and file.metadata["tokenizer.ggml.pre"].data == "qwen2"
            and "general.file_type" not in file.metadata
        )
    with pytest.raises(NotFoundError):
        iqforge.convert_model(folder, tmp_path / "w.gguf")
    assert not list(tmp_path.glob("w.gguf*"))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mtp": "only"}, "without MTP blocks"),
        ({"mla_layout": "ik"}, "deepseek2"),
        ({"mtp": "some"}, "keep, drop, only"),
    ],
)
def test_layouts_that_a_model_has_not(tmp_path: Path, options: dict, words: str):
    with pytest.raises(UsageError, match=words):
        opened(make_tiny_llama(tmp_path), **options)
