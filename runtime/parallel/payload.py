"""What is moved for a sum over ranks (`-grt`): float32, halves, or 8 bits with a scale per 32."""

from __future__ import annotations

import torch

FEW_ROWS = 32  # at most so many rows move in float32, whatever the type: latency decides there
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_BLOCK, _MOST = 32, 127.0


def encoded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what is moved of x float32. As `q8_0`: uint8[blocks, 34], of each 32 elements a scale
    in float16 and the elements in 8 bits. Rows that are no multiple of 32 move as bf16 instead.
    """
    if kind == "q8_0" and x.shape[-1] % _BLOCK:
        kind = "bf16"
    if kind != "q8_0":
        return x.to(DTYPES[kind])
    blocks = x.reshape(-1, _BLOCK).float()
    scales = (blocks.abs().amax(dim=1, keepdim=True) / _MOST).to(torch.float16)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    codes = (blocks * inverse).round().clamp(-_MOST, _MOST).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)


def decoded(moved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return float32 of the shape of `like` from what `encoded` returned for such a tensor."""
    if moved.dtype != torch.uint8:
        return moved.float()
    scales = moved[:, :2].contiguous().view(torch.float16).float()
    return (moved[:, 2:].contiguous().view(torch.int8).float() * scales).view(like.shape)
