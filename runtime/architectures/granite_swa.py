"""granite_swa: Granite whose heads have sinks, with a window in most layers. Some layers may have
no rotation.
"""

from __future__ import annotations

from typing import Any

from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture
from .granite import scaled_network


@architecture("granite_swa", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("norm")
    window = p.integer("attention.sliding_window")
    near = p.flags("attention.sliding_window_pattern", d.n_layers)
    rotated = p.flags("attention.rope_pattern", d.n_layers, (True,) * d.n_layers)

    def mixer(scaled: Decoder, layer: int, scale: float | None) -> Any:
        return scaled.attention(
            layer,
            rope if rotated[layer] else None,
            scale=scale,
            sinks=True,
            window=window if near[layer] else 0,
        )

    return scaled_network(d, mixer)
