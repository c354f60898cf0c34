"""mamba2: models of Mamba-2 alone, such as Codestral Mamba. Every layer is a state-space layer."""

from __future__ import annotations

from ..network.decoder import Decoder
from ..network.network import Network
from ..network.state_space_parts import state_space
from . import architecture


@architecture("mamba2", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    return d.network(lambda layer: d.single_block(layer, state_space(d, layer), mixer=True))
