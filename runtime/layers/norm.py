"""RMS normalization."""

from __future__ import annotations

import torch
from torch.nn import functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich,
    2019).
    """

    split = "replicated"

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
