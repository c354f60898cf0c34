"""The description of a layer with compressed keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs import IndexerSpec


@dataclass(frozen=True)
class CompressedSpec:
    """Attention of DeepSeek V4 (DeepSeek, 2026): all heads share one vector per position, which is
    key and value.

    A token sees the last `window` positions, itself included, and the entries of the runs of
    `ratio` positions that have ended (0: there are none). overlaps: an entry is also made of the
    run before. index: how tokens choose entries; None: they see all. Queries are projected through
    a latent vector of `q_rank`. The last `rope_length` of the `key_length` elements of a head are
    rotated. Results of the heads of each of `groups` are projected to `out_rank` elements.
    """

    heads: int
    key_length: int
    rope_length: int
    q_rank: int
    window: int
    groups: int
    out_rank: int
    ratio: int = 0
    overlaps: bool = False
    index: IndexerSpec | None = None

    @property
    def scale(self) -> float:
        """The scale of scores."""
        return self.key_length**-0.5

    @property
    def most_entries(self) -> int:
        """The most entries that a token sees; 0 for all."""
        return 0 if self.index is None else self.index.top_k
