"""Normalization over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ...formats.tensor_names import TensorName
from ..weights.ranges import RangeName, ranged
from . import many_rows


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich,
    2019).
    """

    split = "replicated"

    def __init__(self, weight: torch.Tensor, eps: float, name: str = "", suffix: str = ".weight"):
        self.weight, self.eps, self.name, self._suffix = weight, eps, name, suffix

    @property
    def tensor(self) -> str:
        """The name of the tensor with its weights."""
        return self.name + self._suffix

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles."""
        return _range(self.name)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = many_rows.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) if found is None else found


class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in float32 (Ba et
    al., 2016).
    """

    split = "replicated"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, name: str = ""):
        self.weight, self.bias, self.eps, self.name = weight, bias, eps, name

    @property
    def tensor(self) -> str:
        """The name of the tensor with its weights."""
        return f"{self.name}.weight"

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles."""
        return _range(self.name)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class HeadLayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last dimension of x [..., heads, n], in
    float32. weight float32[heads, n]: every head has weights of its own.
    """

    split = "rows"

    def __init__(self, weight: torch.Tensor, eps: float, name: str = ""):
        self.weight, self.eps, self.name = weight, eps, name

    @property
    def tensor(self) -> str:
        """The name of the tensor with its weights."""
        return f"{self.name}.weight"

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles."""
        return _range(self.name)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape[-1:], None, None, self.eps) * self.weight


def normed_together(
    x: torch.Tensor, norm: RMSNorm | HeadLayerNorm | None, own: Sequence[int] | None, length: int
) -> torch.Tensor:
    """Norm all heads of x [rows, heads * length] together, and return those of them whose numbers
    are in `own` (None: all), side by side. TypeError for a norm that is no RMS norm.
    """
    if isinstance(norm, HeadLayerNorm):
        raise TypeError(f"{norm.name}: norms over all heads are RMS norms")
    x = x if norm is None else norm(x)
    return x if own is None else x.unflatten(-1, (-1, length))[:, list(own)].flatten(1)


def _range(name: str) -> RangeName:
    parsed = TensorName.parse(name)
    return RangeName("output" if parsed.layer is None else parsed.prefix, parsed.stem or "norm")


class NoNorm(RMSNorm):
    """What stands for the norm before the output in a network that has none: rows stay as they are.
    No kernel evaluates such networks. weight: float32[width] of ones, which says where rows are.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__(weight, 0.0, "output_norm")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


Norm = RMSNorm | LayerNorm
