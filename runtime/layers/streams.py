"""Several residual streams (hyper-connections; Xie et al., 2026): layers read a mixture of them,
and what layers give is added to all of them, which are mixed themselves.

Streams are side by side: float32[rows, n * width].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..weights.linear import Linear


@dataclass(frozen=True)
class StreamSpec:
    """`n` streams. Mixtures have an `epsilon`, which is also that of the iterations that make rows
    and columns of a matrix sum to 1. norm_eps: of the norm of all streams together.
    """

    n: int
    iterations: int
    epsilon: float
    norm_eps: float


class StreamWeights:
    """The numbers that mix streams h: scale * (fn norm(h)) + base, for each group of them with one
    element of scale. The norm has no weights.

    fn: gives all numbers of a row. scale float32[groups]. base float32[numbers].
    """

    def __init__(
        self, spec: StreamSpec, *, fn: Linear, scale: torch.Tensor, base: torch.Tensor, name: str
    ):
        self.spec, self.fn, self.scale, self.base, self.name = spec, fn, scale, base, name

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        for part in ("fn", "scale", "base"):
            yield f"{self.name}_{part}.weight"

    def numbers(self, h: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        """Return groups of numbers float32[rows, size] for h float32[rows, n * width]."""
        mixed = self.fn(F.rms_norm(h, h.shape[-1:], None, self.spec.norm_eps))
        parts = zip(mixed.split(sizes, -1), self.scale, self.base.split(sizes), strict=True)
        return tuple(part * scale + base for part, scale, base in parts)


def joined(h: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of streams h float32[rows, n * width], each times its weight, float32[rows,
    n]: float32[rows, width].
    """
    return (h.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]).sum(dim=-2)


class HyperConnection:
    """What is around a layer: it reads the sum of streams times sigmoid(a) + epsilon; stream k
    becomes 2 sigmoid(b_k) * y + sum over j of C_jk * stream j, for what the layer gives, y.

    C is softmax(c) + epsilon, whose columns are divided by their sums, and then in turns its rows
    and columns (Sinkhorn and Knopp, 1967). a, b and c are the numbers of `weights`.
    """

    def __init__(self, weights: StreamWeights):
        self.weights = weights

    def before(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the layer reads, float32[rows, width], and what `after` needs, for h
        float32[rows, n * width].
        """
        s = self.weights.spec
        a, b, c = self.weights.numbers(h, [s.n, s.n, s.n * s.n])
        c = c.unflatten(-1, (s.n, s.n)).softmax(dim=-1) + s.epsilon
        c = c / (c.sum(dim=-2, keepdim=True) + s.epsilon)
        for _ in range(s.iterations - 1):
            c = c / (c.sum(dim=-1, keepdim=True) + s.epsilon)
            c = c / (c.sum(dim=-2, keepdim=True) + s.epsilon)
        return joined(h, a.sigmoid() + s.epsilon), 2 * b.sigmoid(), c

    def after(
        self, h: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, mixing: torch.Tensor
    ) -> torch.Tensor:
        """Return the streams after the layer, float32[rows, n * width], for those before it and
        what it gives, float32[rows, width]. weights, mixing: of `before`.
        """
        streams = h.unflatten(-1, (self.weights.spec.n, -1))
        mixed = mixing.transpose(-1, -2) @ streams
        return (weights[..., None] * y[:, None] + mixed).flatten(1)


class StreamEnds:
    """The `n` streams before the first layer, all alike, and what they become after the last one:
    the sum of each times sigmoid(a) + epsilon, or without weights their mean.
    """

    def __init__(self, n: int, weights: StreamWeights | None = None):
        self.n, self.weights = n, weights

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        return iter(()) if self.weights is None else self.weights.tensors

    def begin(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, n * width] for embeddings float32[rows, width]."""
        return h.repeat(1, self.n)

    def end(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, width] for h float32[rows, n * width]."""
        if self.weights is None:
            return h.unflatten(-1, (self.n, -1)).mean(dim=-2)
        [a] = self.weights.numbers(h, [self.n])
        return joined(h, a.sigmoid() + self.weights.spec.epsilon)
