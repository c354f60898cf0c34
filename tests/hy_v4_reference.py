"""Hy4 as its checkpoints are: rotary pairs are neighbours, as vLLM and llama.cpp rotate them.
transformers 5.23 rotates elements half a head apart, without reordering rows of the checkpoint.
"""

from __future__ import annotations

import torch
from transformers.models.hy_v4 import modeling_hy_v4


def rotated_pairs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k with neighbours rotated by the angles whose cos and sin are given twice."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    return turned(q), turned(k)


class HYV4ForCausalLM(modeling_hy_v4.HYV4ForCausalLM):
    """The class of transformers, with the other rotation while it runs."""

    def forward(self, *args, **kwargs):
        usual = modeling_hy_v4.apply_rotary_pos_emb
        modeling_hy_v4.apply_rotary_pos_emb = rotated_pairs
        try:
            return super().forward(*args, **kwargs)
        finally:
            modeling_hy_v4.apply_rotary_pos_emb = usual
