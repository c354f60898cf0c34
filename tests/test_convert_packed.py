"""Checkpoints that store their weights quantized: decoded values equal what the layout rules say, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from iqforge.convert.checkpoint import open_checkpoint
from iqforge.convert.packed.scaled import F8_E4M3, F8_E5M2, F8_E8M0
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError
from iqforge.formats.codec import decode

from .golden import assert_like_reference
from .tiny_checkpoint import make_tiny_llama

NAME = "model.layers.1.mlp.up_proj"


def test_deepseek_equals_the_reference(tmp_path: Path):
    # order differs: tensors of a shard are read by name there, as they lie here
    assert_like_reference(tmp_path, "deepseek_v3_fp8", bytes_too=False)


@pytest.mark.parametrize("table, dtype", [(F8_E4M3, torch.float8_e4m3fn), (F8_E5M2, torch.float8_e5m2), (F8_E8M0, torch.float8_e8m0fnu)])
def test_tables_of_small_floats(table: np.ndarray, dtype: torch.dtype):
    assert np.array_equal(table, torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy(), equal_nan=True)


def packed_llama(folder: Path, change, section: dict) -> Path:
    """A tiny Llama whose tensors `change(dict)` has packed, with `section` as its quantization_config. Rows of 48, 80 in the feed-forward."""
    make_tiny_llama(folder, n_layers=2, n_embd=48, n_ff=80, n_heads=4, n_kv_heads=2, config={"quantization_config": section})
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def up_projection(folder: Path) -> np.ndarray:
    """`blk.1.ffn_up.weight` as converted, read seven rows at a time."""
    with CheckpointSource(open_checkpoint(folder)) as source:
        tensor = next(t for t in source.tensors if t.name == "blk.1.ffn_up.weight")
        rows = [source.read_rows(tensor, start, min(start + 7, tensor.n_rows)) for start in range(0, tensor.n_rows, 7)]
        source.release(tensor)
        assert np.array_equal(source.read_rows(tensor, 3, 5), np.concatenate(rows)[3:5])
        return decode(tensor.type, np.concatenate(rows), tensor.n_cols)


def random_codes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape, block", [((), None), ((1,), None), ((80,), None), ((80, 1), None), ((3, 4), [32, 13]), ((1, 1), [128, 128])])
def test_fp8(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], block: list[int] | None):
    codes, scale = random_codes((80, 48), dtype), torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5

    def change(tensors):
        tensors |= {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scale, f"{NAME}.activation_scale": torch.ones(1)}

    found = up_projection(packed_llama(tmp_path, change, {"quant_method": "fp8", "weight_block_size": block}))
    if block is None or scale.numel() == 1:
        spread = scale.reshape(-1, 1)
    else:
        spread = scale.repeat_interleave(block[0], 0)[:80].repeat_interleave(block[1], 1)[:, :48]
    assert np.array_equal(found, (codes.float() * spread).numpy())


@pytest.mark.parametrize("scale, section, words", [
    (torch.ones(2, 1), {"weight_block_size": [32, 48]}, r"scale_inv': has shape \[2, 1\]; .* asks for \[3, 1\]"),
    (torch.ones(79), {}, "one per tensor"), (torch.ones(1, dtype=torch.int32), {}, "scales are floats"),
    (torch.ones(1), {"weight_block_size": [0, 1]}, "weight_block_size"), (torch.ones(1), {"quant_method": "abc"}, "'abc' cannot be read"),
    (None, {}, "dtype F8_E4M3 is not supported")])
def test_scales_that_do_not_fit(tmp_path: Path, scale: torch.Tensor | None, section: dict, words: str):
    def change(tensors):
        tensors[f"{NAME}.weight"] = random_codes((80, 48), torch.float8_e4m3fn)
        if scale is not None:
            tensors[f"{NAME}.weight_scale_inv"] = scale

    folder = packed_llama(tmp_path, change, {"quant_method": "fp8"} | section)
    with pytest.raises((CheckpointError, Exception), match=words) as raised:
        up_projection(folder)
    assert type(raised.value).__module__ == "iqforge.errors"


def test_bf16_weight_with_a_scale(tmp_path: Path):
    def change(tensors):
        tensors[f"{NAME}.weight_scale_inv"] = torch.ones(1)

    with pytest.raises(CheckpointError, match="has a scale, but is BF16"):
        up_projection(packed_llama(tmp_path, change, {"quant_method": "fp8"}))
