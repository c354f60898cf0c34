"""The split plan of a model that is opened as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..formats.source import Source
from .architectures import build_network
from .hyperparameters import Hyperparameters
from .network import Network
from .parallel.expert_mode import ExpertChoice
from .parallel.plan import SplitPlan
from .parallel.planner import plan_split
from .parallel.tensor_splits import COLUMN_STEP
from .placement import CPU, Placement
from .switches import Switches
from .weights import DecodeCache, Weights


def make_plan(
    source: Source,
    shares: Sequence[float],
    switches: Switches = Switches(),
    *,
    experts: ExpertChoice = "auto",
    reference: bool = False,
    column_step: int = COLUMN_STEP,
) -> SplitPlan:
    """Plan the split of a model; see `plan_split`. Reads its vectors, no matrix. Errors also as for
    a model that is opened.
    """
    network = whole_network(source, switches)
    return plan_split(
        network,
        source.tensors,
        shares,
        experts=experts,
        reference=reference,
        column_step=column_step,
    )


def whole_network(source: Source, switches: Switches = Switches()) -> Network:
    """Build the network of a model on the CPU, with no matrix read yet."""
    p = Hyperparameters(source.metadata, os.fspath(source.path))
    placement = Placement(CPU, p.integer("block_count", 0))
    return build_network(p, Weights(source, placement, DecodeCache(), switches))
