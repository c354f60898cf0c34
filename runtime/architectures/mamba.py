"""mamba: models of the first Mamba alone, also Falcon-Mamba. Every layer is a selective state
space, for which there are no kernels.
"""

from __future__ import annotations

from ..network.decoder import Decoder
from ..network.network import Network
from ..network.selective_parts import selective
from . import architecture


@architecture("mamba", hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    return d.network(lambda layer: d.single_block(layer, selective(d, layer), mixer=True))
