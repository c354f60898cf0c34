"""Builders of several residual streams."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.streams import HyperConnection, StreamEnds, StreamSpec, StreamWeights
from .decoder import Decoder

_MOST_STREAMS = 64  # far beyond any model


@dataclass(frozen=True)
class StreamParts:
    """Builders of what is around the layers of a block, and before and after all blocks."""

    d: Decoder
    spec: StreamSpec

    @classmethod
    def read(cls, d: Decoder) -> StreamParts:
        """Raise ConfigError, with file and key, for numbers that are not possible."""
        p = d.p
        spec = StreamSpec(
            p.integer("hyper_connection.count", most=_MOST_STREAMS),
            p.integer("hyper_connection.sinkhorn_iterations", most=1000),
            p.number("hyper_connection.epsilon", least=0),
            d.eps,
        )
        return cls(d, spec)

    def around(self, layer: int) -> tuple[HyperConnection, HyperConnection]:
        """Return what is around the mixer and the feed-forward layer of a block."""
        n = self.spec.n
        mixer, ffn = (
            HyperConnection(self._weights(f"blk.{layer}.hc_{part}", f"hc_{part}", (2 + n) * n, 3))
            for part in ("attn", "ffn")
        )
        return mixer, ffn

    def ends(self, *, mean: bool = False) -> StreamEnds:
        """Return how the streams begin and end. mean: in their mean, without tensors."""
        n = self.spec.n
        return StreamEnds(n, None if mean else self._weights("output_hc", "output_hc", n, 1))

    def _weights(self, name: str, role: str, numbers: int, groups: int) -> StreamWeights:
        d, w = self.d, self.d.w
        fn = w.linear(
            f"{name}_fn",
            self.spec.n * d.width,
            numbers,
            role=f"{role}_fn",
            split="replicated",
        )
        scale, base = (
            w.vector(f"{name}_{part}.weight", n)
            for part, n in (("scale", groups), ("base", numbers))
        )
        return StreamWeights(self.spec, fn=fn, scale=scale, base=base, name=name)
