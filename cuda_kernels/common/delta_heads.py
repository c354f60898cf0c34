"""The shape of a gated delta net, for its kernels of prompts and of decoding steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaHeads:
    """Heads, their lengths, and the taps of the convolution. tiled: value head j reads key head
    j % key_heads. joined: queries, keys, values and gates of each key head in turn are one product.
    """

    key_heads: int
    value_heads: int
    key_length: int
    value_length: int
    taps: int
    tiled: bool
    joined: bool

    @property
    def name(self) -> str:
        """Return heads and lengths for the name of a kernel."""
        return f"{self.key_heads}x{self.key_length}_{self.value_heads}x{self.value_length}"

    @property
    def layout(self) -> str:
        """Return the end of the name of a kernel."""
        return f"{'_tiled' * self.tiled}{'_joined' * self.joined}"

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Return what sources are compiled with."""
        return (
            ("KEY_HEADS", str(self.key_heads)),
            ("VALUE_HEADS", str(self.value_heads)),
            ("KEY", str(self.key_length)),
            ("VALUE", str(self.value_length)),
            ("TAPS", str(self.taps)),
            ("TILED", str(int(self.tiled))),
            ("JOINED", str(int(self.joined))),
        )
