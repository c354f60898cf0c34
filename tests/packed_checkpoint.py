"""Tiny checkpoints with a matrix that is stored quantized, and their conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.formats.codecs.codec import decode
from safetensors.torch import load_file, save_file

from .tiny_checkpoint import make_tiny_llama

NAME = "model.layers.1.mlp.up_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed_llama(folder: Path, change, section: dict | None) -> Path:
    """Write a tiny Llama whose tensors `change(dict)` has packed, with `section` as its
    quantization_config. Rows of 48 and 80.
    """
    make_tiny_llama(
        folder,
        n_layers=2,
        n_embd=48,
        n_ff=80,
        n_heads=4,
        n_kv_heads=2,
        config={"quantization_config": section},
    )
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def up_projection(folder: Path) -> np.ndarray:
    """Return `blk.1.ffn_up.weight` as converted, read seven rows at a time."""
    with CheckpointSource(open_checkpoint(folder)) as source:
        tensor = next(t for t in source.tensors if t.name == "blk.1.ffn_up.weight")
        rows = [
            source.read_rows(tensor, start, min(start + 7, tensor.n_rows))
            for start in range(0, tensor.n_rows, 7)
        ]
        source.release(tensor)
        assert np.array_equal(source.read_rows(tensor, 3, 5), np.concatenate(rows)[3:5])
        return decode(tensor.type, np.concatenate(rows), tensor.n_cols)


def pack(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack unsigned values into int32 words along `dim`, lowest bits first, padded with zeros."""
    values = values.movedim(dim, -1).to(torch.int64)
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % (32 // bits))).unflatten(
        -1, (-1, 32 // bits)
    )
    words = (values << torch.arange(0, 32, bits)).sum(-1)
    return (
        torch.where(words >= 2**31, words - 2**32, words)
        .to(torch.int32)
        .movedim(-1, dim)
        .contiguous()
    )


def nvfp4_parts(
    rows: int, cols: int, factor: float, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors of a random NVFP4 matrix, and its values without the factor of the
    matrix.
    """
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=random)
    scale = (torch.rand((rows, cols // 16), generator=random) * 300).to(torch.float8_e4m3fn)
    parts = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": torch.tensor(factor),
        "input_scale": torch.tensor(factor / 2),
    }
    return parts, E2M1[codes] * scale.float().repeat_interleave(16, 1)
