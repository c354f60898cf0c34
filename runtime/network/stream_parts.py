"""Builders of several residual streams."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.streams import (
    Connection,
    HyperConnection,
    KeepingConnection,
    StreamEnds,
    StreamSpec,
    StreamWeights,
)
from .decoder import Decoder

_MOST_STREAMS = 64  # far beyond any model


@dataclass(frozen=True)
class StreamParts:
    """Builders of what is around the layers of a block, and before and after all blocks. magnitude:
    of what layers give, where streams keep what they are; 0 where they are mixed.
    """

    d: Decoder
    spec: StreamSpec
    magnitude: float = 0.0

    @classmethod
    def read(cls, d: Decoder, *, keeping: bool = False) -> StreamParts:
        """keeping: streams are not mixed themselves. Raise ConfigError, with file and key, for
        numbers that are not possible.
        """
        p = d.p
        spec = StreamSpec(
            p.integer("hyper_connection.count", most=_MOST_STREAMS),
            0 if keeping else p.integer("hyper_connection.sinkhorn_iterations", most=1000),
            p.number("hyper_connection.epsilon", least=0),
            d.eps,
        )
        return cls(d, spec, p.number("hyper_connection.magnitude", above=0) if keeping else 0.0)

    def around(self, layer: int) -> tuple[Connection, Connection]:
        """Return what is around the mixer and the feed-forward layer of a block."""
        n = self.spec.n
        if self.magnitude:
            mixer, ffn = (
                KeepingConnection(
                    self._weights(f"blk.{layer}.hc_{part}", f"hc_{part}", 2 * n, 2), self.magnitude
                )
                for part in ("attn", "ffn")
            )
            return mixer, ffn
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
