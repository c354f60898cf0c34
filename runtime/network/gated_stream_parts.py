"""Builders of residual streams whose mixers give each element a weight."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.streams import GatedConnection, GatedEnds, StreamMixer, StreamNorm
from .decoder import Decoder

_MOST_STREAMS = 64  # far beyond any model


@dataclass(frozen=True)
class GatedStreamParts:
    """Builders of what is around the layers of a block, and after all blocks, of `n` streams.
    rank: elements between the two products of a mixer.
    """

    d: Decoder
    n: int
    rank: int

    @classmethod
    def read(cls, d: Decoder) -> GatedStreamParts:
        """Raise ConfigError, with file and key, for numbers that are not possible."""
        n = d.p.integer("hyper_connection.count", least=2, most=_MOST_STREAMS)
        return cls(d, n, d.p.integer("hyper_connection.low_rank"))

    def norm(self, name: str) -> StreamNorm:
        """Return the norm `<name>.weight` of each stream."""
        tensor = f"{name}.weight"
        return StreamNorm(
            self.d.w.vector(tensor, self.n * self.d.width), self.n, self.d.eps, tensor
        )

    def around(self, layer: int) -> tuple[GatedConnection, GatedConnection]:
        """Return what is around the mixer and the feed-forward layer of a block."""
        attn, ffn = (
            GatedConnection(
                self._mixer(f"blk.{layer}.hc_{part}", f"hc_{part}"),
                self._product(f"blk.{layer}.hc_{part}", f"hc_{part}", "inject", self.n),
            )
            for part in ("attn", "ffn")
        )
        return attn, ffn

    def ends(self) -> GatedEnds:
        """Return how the streams begin and end."""
        return GatedEnds(self._mixer("output_hc", "output_hc"))

    def _mixer(self, name: str, role: str) -> StreamMixer:
        return StreamMixer(
            self.norm(f"{name}_norm"),
            self._product(name, role, "down", self.rank),
            self._product(name, role, "up", self.n * self.d.width, self.rank),
        )

    def _product(self, name: str, role: str, part: str, n_out: int, n_in: int = 0):
        return self.d.w.linear(
            f"{name}_{part}",
            n_in or self.n * self.d.width,
            n_out,
            role=f"{role}_{part}",
            split="replicated",
        )
