"""NVFP4 checkpoints run: every matrix, and every expert, has a scale beside its blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.weights.switches import Switches
from safetensors.torch import load_file, save_file

from .packed_checkpoint import nvfp4_parts
from .tiny_checkpoint import PROSE, make_tiny_llama, make_tiny_qwen3moe

SECTION = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
TOKENS = np.random.default_rng(3).integers(2, 300, 30)


def make(folder: Path, kind: str, packed: bool) -> Path:
    """Write a checkpoint whose layers are NVFP4, or the same numbers as floats."""
    options = {"n_layers": 2, "dtype": "f32", "config": SECTION if packed else None}
    if kind == "dense":
        make_tiny_llama(folder, n_embd=64, n_ff=128, n_heads=4, n_kv_heads=2, **options)
    else:
        make_tiny_qwen3moe(folder, n_ff_expert=64, **options)
    tensors = load_file(folder / "model.safetensors")
    for i, name in enumerate(sorted(tensors)):
        if not name.endswith("_proj.weight"):
            continue
        factor = 1e-4 * (1 + i % 5)
        parts, values = nvfp4_parts(*tensors[name].shape, factor, seed=i)
        if packed:
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}{part}": stored for part, stored in parts.items()}
        else:
            tensors[name] = values * torch.tensor(factor)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path, **options) -> torch.Tensor:
    with CheckpointSource(open_checkpoint(folder)) as source:
        return Model(source, **options).forward(TOKENS)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_logits_are_those_of_the_same_numbers_as_floats(tmp_path, kind):
    packed, floats = (make(tmp_path / str(flag), kind, flag) for flag in (True, False))
    with CheckpointSource(open_checkpoint(packed)) as source:
        types = {t.name: t.type.name for t in source.tensors}
        assert "NVFP4" in types.values() and any(name.endswith(".scale") for name in types)
    found, expected = logits(packed), logits(floats)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-4
    merged = logits(packed, switches=Switches(merge_gate_up=True))  # experts have scales: nothing
    assert torch.equal(merged, found)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_commands(tmp_path, capsys, kind):
    text, path = tmp_path / "text.txt", tmp_path / "model.gguf"
    text.write_text(PROSE)

    def run(*arguments: object) -> None:
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err

    run("convert", make(tmp_path / "hf", kind, True), "--outfile", path)
    chunks = ("-f", text, "-c", 16, "--chunks", 2, "--device", "cpu")
    run("perplexity", "-m", path, *chunks)
    run("imatrix", "-m", path, "-o", tmp_path / "x.imatrix", *chunks)
    options = ("--allow-requantize", "--imatrix", tmp_path / "x.imatrix")
    run("quantize", *options, path, tmp_path / "q.gguf", "Q8_0")
    with load_model(path) as model, load_model(tmp_path / "q.gguf") as quantized:
        error = model.forward(TOKENS) - quantized.forward(TOKENS)
        assert error.std() < 0.05 * model.forward(TOKENS).std()
