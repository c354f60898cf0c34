"""Several residual streams: layers read a mixture of them, and what layers give is added to all of
them. There are two kinds: hyper-connections, which mix the streams themselves, too (Xie et al.,
2026), and streams as in Qwen3.8-Flash-Next (Qwen, 2026), whose mean has a weight for each element.

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

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        return self.weights.tensors

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


class KeepingConnection:
    """What is around a layer of a model whose streams keep what they are: it reads the sum of
    streams times sigmoid(a) + epsilon; stream k becomes itself plus magnitude * sigmoid(b_k) +
    epsilon times what the layer gives. a and b are the numbers of `weights`.
    """

    def __init__(self, weights: StreamWeights, magnitude: float):
        self.weights, self.magnitude = weights, magnitude

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        return self.weights.tensors

    def before(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer reads, float32[rows, width], and the weights that `after` needs,
        for h float32[rows, n * width].
        """
        s = self.weights.spec
        a, b = self.weights.numbers(h, [s.n, s.n])
        return joined(h, a.sigmoid() + s.epsilon), self.magnitude * b.sigmoid() + s.epsilon

    def after(self, h: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the streams after the layer, float32[rows, n * width], for those before it and
        what it gives, float32[rows, width]. weights: of `before`.
        """
        return h + (weights[..., None] * y[:, None]).flatten(1)


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


class StreamNorm:
    """An RMS norm of each of n streams alone. weight: float32[n * width]."""

    def __init__(self, weight: torch.Tensor, n: int, eps: float, tensor: str):
        self.weight, self.n, self.eps, self.tensor = weight, n, eps, tensor

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """h float32[rows, n * width], to the same shape."""
        streams = h.unflatten(-1, (self.n, -1))
        return F.rms_norm(streams, streams.shape[-1:], None, self.eps).flatten(-2) * self.weight


class StreamMixer:
    """The mean over n normed streams x of sigmoid(up silu(down x / n)) * x."""

    def __init__(self, norm: StreamNorm, down: Linear, up: Linear):
        self.norm, self.down, self.up = norm, down, up

    @property
    def n(self) -> int:
        """Streams."""
        return self.norm.n

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        yield self.norm.tensor
        yield from (self.down.name, self.up.name)

    def __call__(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean float32[rows, width], and the normed streams, for h float32[rows, n *
        width].
        """
        x = self.norm(h)
        gates = self.up(F.silu(self.down(x) / self.n)).sigmoid()
        return (gates * x).unflatten(-1, (self.n, -1)).mean(dim=-2), x


class GatedConnection:
    """What is around a layer: it reads what `mixer` gives, and 2 sigmoid(inject x / n) times what
    it gives itself is added to the streams, for the normed streams x.
    """

    def __init__(self, mixer: StreamMixer, inject: Linear):
        self.mixer, self.inject = mixer, inject

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        yield from self.mixer.tensors
        yield self.inject.name

    def before(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer reads, float32[rows, width], and the weights that `after` needs,
        for h float32[rows, n * width].
        """
        read, x = self.mixer(h)
        return read, 2 * (self.inject(x) / self.mixer.n).sigmoid()

    def after(self, h: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the streams after the layer, float32[rows, n * width], for those before it and
        what it gives, float32[rows, width]. weights: of `before`.
        """
        return h + (weights[..., None] * y[:, None]).flatten(1)


class GatedEnds:
    """The streams before the first layer, all alike, and what `mixer` makes of them after the last
    one, which is normed.
    """

    def __init__(self, mixer: StreamMixer):
        self.mixer = mixer

    @property
    def n(self) -> int:
        """Streams."""
        return self.mixer.n

    @property
    def tensors(self) -> Iterator[str]:
        """The names of its tensors, which are whole on every rank."""
        return self.mixer.tensors

    def begin(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, n * width] for embeddings float32[rows, width]."""
        return h.repeat(1, self.n)

    def end(self, h: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, width] for h float32[rows, n * width]."""
        return self.mixer(h)[0]


Connection = HyperConnection | KeepingConnection | GatedConnection
Ends = StreamEnds | GatedEnds
