"""Alternating updates (AltUp; Baykal et al., 2023) as in Gemma 3n (Google, 2025): a token has
several streams of the width of the model. Layers work on the first one, which is the residual
stream of blocks; the others are in the scratch of a batch, float32[rows, streams - 1, width].

Branches of a block: `AltUpPredict`, attention, `Laurel`, a feed-forward layer, `AltUpCorrect`; in
the last block also `AltUpMerge`.
"""

from __future__ import annotations

import torch

from ...weights.linear import Linear
from ...weights.stacked_linear import HeadLinear
from ..batch import Batch
from ..ffn import activate
from ..norm import RMSNorm
from ..specs import FFNSpec

_LEAST = 1e-5  # mean square that streams are divided by


def left_streams(batch: Batch, layer: int) -> torch.Tensor | None:
    """Return the streams but the first that were left for a layer, float32[rows, streams - 1,
    width]; None if there are none.
    """
    return batch.scratch.get(("streams", layer))


def leave_streams(batch: Batch, layer: int, streams: torch.Tensor) -> None:
    """Leave the streams but the first for a layer. Those of the layer that is done stay, as it may
    run again (`layerwise`); earlier ones are dropped.
    """
    batch.scratch["streams", layer] = streams
    batch.scratch.pop(("streams", layer - 2), None)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each x float32[..., width], [..., 1]."""
    return x.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()


class AltUpRouter:
    """Weights of streams, tanh(W norm(x) / width), float32[rows, streams]."""

    def __init__(self, norm: RMSNorm, linear: Linear):
        self.norm, self.linear = norm, linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x) / x.shape[-1]))


class AltUpRows:
    """What works on every row alone, and every tensor-parallel rank computes as a whole."""

    experts_used, expert_share = 1, 1.0


class AltUpPredict(AltUpRows):
    """What the layer would find: stream i += sum of c[i, j] stream j, with c, streams x streams
    numbers, by `coefficients` from the router of the first stream.

    expand: makes the other streams in the first layer, where x are embeddings: products that are
    scaled to the magnitude of x. The prediction of the first stream stays in the scratch.
    """

    def __init__(self, router: AltUpRouter, coefficients: Linear, expand: HeadLinear | None):
        self.router, self.coefficients, self.expand = router, coefficients, expand

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width], the first stream, to what is added to it."""
        if self.expand is not None:
            leave_streams(batch, batch.layer, self._expanded(x, self.expand))
        others = batch.scratch["streams", batch.layer].to(x.device)
        streams = torch.cat([x[:, None], others], dim=1)
        n = streams.shape[1]
        c = self.coefficients(self.router(x)).unflatten(-1, (n, n))
        added = torch.bmm(c, streams)
        streams += added
        batch.scratch["predicted", batch.layer] = streams
        return added[:, 0].contiguous()

    def _expanded(self, x: torch.Tensor, expand: HeadLinear) -> torch.Tensor:
        n = len(expand.matrices)
        made = expand(x.to(expand.device)[:, None].expand(-1, n, -1)).to(x.device)
        target = x.square().mean(-1, keepdim=True).sqrt()
        return made * (target[:, None] / _magnitude(made))


class Laurel(AltUpRows):
    """A learned augmented residual layer (LAuReL; Menghani et al., 2024) of low rank: the stream x
    after attention becomes (x + n + post_norm(right(left n))) / sqrt(2), with n = norm of what
    attention has read.
    """

    def __init__(self, norm: RMSNorm, left: Linear, right: Linear, post_norm: RMSNorm):
        self.norm, self.left, self.right, self.post_norm = norm, left, right, post_norm

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to what is added to it."""
        read = self.norm(_predicted(batch, x)[:, 0].contiguous())
        low = read + self.post_norm(self.right(self.left(read)))
        return (x + low) * 0.5**0.5 - x


class AltUpCorrect(AltUpRows):
    """Corrects the predictions by what the layer has found: stream i += (1 + c[i]) (x - predicted
    x), with c by `coefficients` from the router of x. To the others also
    post_norm(projection(activation(gate(scale x)) * inputs of the layer)) is added, where x is the
    corrected one.
    """

    def __init__(
        self,
        router: AltUpRouter,
        coefficients: Linear,
        scale: torch.Tensor,
        gate: Linear,
        projection: Linear,
        post_norm: RMSNorm,
        spec: FFNSpec,
    ):
        self.router, self.coefficients, self.scale = router, coefficients, scale
        self.gate, self.projection, self.post_norm, self.spec = gate, projection, post_norm, spec

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width], the first stream, to what is added to it."""
        if batch.inputs is None:
            raise TypeError("the batch has no inputs for layers")
        predicted = _predicted(batch, x)
        found = x - predicted[:, 0]
        c = self.coefficients(self.router(x))
        added = found * c[:, :1]
        inputs = batch.inputs[:, batch.layer].to(x.device)
        gate = activate(self.spec, self.gate((x + added) * self.scale))
        more = self.post_norm(self.projection(gate * inputs))
        others = predicted[:, 1:] + (1 + c[:, 1:, None]) * found[:, None] + more[:, None]
        leave_streams(batch, batch.layer + 1, others)
        del batch.scratch["predicted", batch.layer]
        return added


class AltUpMerge(AltUpRows):
    """After the last layer, the mean of the first stream x and products of the others, which are
    scaled to the magnitude of x.
    """

    def __init__(self, projections: HeadLinear):
        self.projections = projections

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width], the first stream, to what is added to it."""
        others = batch.scratch["streams", batch.layer + 1]
        made = self.projections(others.to(self.projections.device)).to(x.device)
        target = x.square().mean(-1, keepdim=True).sqrt()
        scaled = made * (target[:, None] / _magnitude(made))
        return (x + scaled.sum(1)) / (1 + scaled.shape[1]) - x


def _predicted(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Return all predicted streams of this layer, float32[rows, streams, width], where x is."""
    return batch.scratch["predicted", batch.layer].to(x.device)
