"""Checkpoints, configs, tensors and options that conversion refuses, and what the error says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.api import open_source
from iqforge.convert.architectures.registry import architecture_class, register, supported
from iqforge.convert.checkpoint.folder import open_checkpoint
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
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES

from .opened_checkpoint import opened, stored
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe, write_safetensors


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
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            ConfigError,
            "'rope_scaling' and 'rope_parameters' differ: 'type' is \"yarn\" and \"default\"",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            ConfigError,
            "'factor' is 4.0 and 2.0",
        ),
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


def test_both_spellings_of_the_same_rotation(tmp_path: Path):
    linear = {"factor": 2.0, "rope_theta": 1e6}
    config = {
        "rope_parameters": {"rope_type": "linear"} | linear,
        "rope_scaling": {"type": "linear", "factor": 2},
    }
    make_tiny_llama(tmp_path, config=config)
    with opened(tmp_path) as source:
        assert source.metadata["llama.rope.scaling.factor"].data == 2.0


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


def test_a_gguf_file_is_not_converted(tmp_path: Path):
    made = iqforge.convert_model(make_tiny_llama(tmp_path / "m", n_layers=1), tmp_path / "m.gguf")
    before = made.read_bytes()
    for out in (None, tmp_path / "n.gguf"):
        with pytest.raises(UsageError, match="is a GGUF file already, conversion takes a ch"):
            iqforge.convert_model(made, out)
    assert made.read_bytes() == before and [path.name for path in tmp_path.glob("*.gguf")] == [
        "m.gguf"
    ]


@pytest.mark.parametrize(
    "files, words",
    [
        ([], "a checkpoint is a folder with config.json and safetensors files"),
        (["b.gguf", "a.gguf"], "it has a.gguf, which is converted already: name that file"),
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
