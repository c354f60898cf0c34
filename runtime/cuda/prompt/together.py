"""Several pieces of a sequence, layer by layer: what a layer copies to the device is copied once
for all of them. Activations are those of one piece at a time; only residual streams are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ...layers.attention import Attention
from ...layers.batch import Batch
from ...layers.mla import MLA
from ...network.network import Network
from ..common.context import Angles, Context
from .common.graphs import Stage
from .common.stream import Stream

STREAM_BYTES = 64 << 20  # of all residual streams


@dataclass
class Piece:
    """A piece on its way through the layers."""

    stream: Stream
    batch: Batch
    angles: Angles = field(default_factory=dict)


def fits(network: Network) -> bool:
    """Return whether layers leave nothing for others but the residual stream and their own state:
    buffers hold what belongs to one piece.
    """
    mixers = [block.mixer for block in network.blocks]
    shares_keys = any(
        m.spec.kv_shared or m.spec.kv_from is not None for m in mixers if isinstance(m, Attention)
    )
    chooses = any(m.top_k for m in mixers if isinstance(m, MLA))
    return network.stage is None and not shares_keys and not chooses


def most_pieces(width: int, ubatch: int) -> int:
    """Return how many pieces of `ubatch` tokens are on their way at a time."""
    return max(1, STREAM_BYTES // (4 * width * ubatch))


def run_layers(
    steps: Sequence[tuple[int, Stage]], pieces: Sequence[Piece], context: Context
) -> None:
    """Run (layer, what to call) on all pieces, which are in order."""
    for layer, of_layer in groupby(steps, key=lambda step: step[0]):
        calls = [call for _, call in of_layer]
        for piece in pieces:
            context.use_angles(piece.angles)
            piece.stream.accompanied = True
            batch = piece.batch.at(layer, context.device)
            for call in calls:
                call(piece.stream, batch)
            # What is not added yet is in a buffer that the next piece uses.
            piece.stream.settled()
            piece.stream.accompanied = False
