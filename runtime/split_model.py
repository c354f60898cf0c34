"""The split plan of a model that is opened as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..formats.source import Source
from .architectures import build_network
from .layers.block import Block
from .layers.gemma import DenseAndExperts, LayerInput
from .network.network import Network
from .parallel.expert_mode import ExpertChoice
from .parallel.planner import plan_split
from .parallel.share import Share
from .parallel.tensor_splits import COLUMN_STEPS
from .weights.encoded import DecodeCache
from .weights.hyperparameters import Hyperparameters
from .weights.placement import CPU, Placement
from .weights.split_plan import SplitPlan
from .weights.switches import Switches
from .weights.weights import Weights


def make_plan(
    source: Source,
    shares: Sequence[float],
    switches: Switches = Switches(),
    *,
    experts: ExpertChoice = "auto",
    reference: bool = False,
    column_steps: Sequence[int] = COLUMN_STEPS,
) -> SplitPlan:
    """Plan the split of a model; see `plan_split`. Reads its vectors, no matrix. Errors also as for
    a model that is opened.
    """
    network = network_of(source, switches)
    return plan_split(
        network,
        source.tensors,
        shares,
        experts=experts,
        reference=reference,
        column_steps=column_steps,
    )


def network_of(
    source: Source, switches: Switches = Switches(), share: Share | None = None
) -> Network:
    """Build the network of a model, or of a rank's share of it, on the CPU, with no matrix read
    yet.
    """
    p = Hyperparameters(source.metadata, os.fspath(source.path))
    placement = Placement(CPU, p.integer("block_count", 0))
    return build_network(p, Weights(source, placement, DecodeCache(), switches, share))


def sums_of(block: Block) -> int:
    """Return how many partial results the ranks of a split add up in a block."""
    found = 0
    for branch in block.branches:
        if isinstance(branch.module, DenseAndExperts):
            found += 2
        elif not isinstance(branch.module, LayerInput):
            found += 1
    return found
