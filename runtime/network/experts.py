"""The layers of a network that have experts."""

from __future__ import annotations

from collections.abc import Iterator

from ..layers.block import Block
from ..layers.dense_and_experts import DenseAndExperts
from ..layers.moe import MoE
from .network import Network


def moe_layers(network: Network) -> Iterator[MoE]:
    """Return all experts, also those next to a dense layer or to attention."""
    for block in network.blocks:
        yield from experts_of(block)


def experts_of(block: Block) -> Iterator[MoE]:
    """Return the experts of a block; most blocks have them once or not at all."""
    for branch in block.branches:
        for module in branch.modules:
            moe = module.moe if isinstance(module, DenseAndExperts) else module
            if isinstance(moe, MoE):
                yield moe
