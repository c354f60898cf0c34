"""The split plan of a model that is opened as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..formats.source import Source
from .architectures import build_network
from .layers.attention import Attention
from .layers.block import Block
from .layers.dense_and_experts import DenseAndExperts
from .layers.ffn import GatedFFN
from .layers.layer_input import LayerInput
from .layers.mla import MLA
from .layers.rowwise.altup import AltUpRows
from .network.network import Network
from .parallel.expert_mode import ExpertChoice
from .parallel.planner import plan_split
from .parallel.share import Share
from .parallel.stages import Line, Stage, layer_ends
from .parallel.tensor_splits import COLUMN_STEPS
from .weights.encoded import DecodeCache
from .weights.hyperparameters import Hyperparameters
from .weights.placement import ALL, CPU, Placement
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


def make_stage(
    source: Source,
    shares: Sequence[float],
    line: Line,
    device: torch.device,
    *,
    gpu_layers: int = ALL,
    switches: Switches = Switches(),
) -> Stage:
    """Return the layers of a rank on `device` where ranks have whole layers: those that are on a
    GPU by `gpu_layers` are divided by `shares`, and the first rank has the others too.
    """
    network = network_of(source, switches)
    n_layers = len(network.blocks)
    first = 0 if device.type == "cpu" else max(0, n_layers - gpu_layers)
    return Stage(layer_ends(n_layers, shares, first, kept_together(network)), line, device)


def kept_together(network: Network) -> list[range]:
    """Return ranges of layers that use what the first of them leaves: keys and values, or the
    positions that an indexer has chosen.
    """
    found: list[range] = []
    chosen = 0
    for layer, block in enumerate(network.blocks):
        mixer = block.mixer
        if isinstance(mixer, Attention) and mixer.spec.kv_from is not None:
            found.append(range(mixer.spec.kv_from, layer + 1))
        elif isinstance(mixer, MLA) and mixer.top_k:
            if mixer.indexer is not None:
                chosen = layer
            else:
                found.append(range(chosen, layer + 1))
    joined: list[range] = []
    for one in sorted(found, key=lambda one: one.start):
        if joined and one.start < joined[-1].stop:
            one = range(joined[-1].start, max(one.stop, joined.pop().stop))
        joined.append(one)
    return joined


def network_of(
    source: Source, switches: Switches = Switches(), share: Share | None = None
) -> Network:
    """Build the network of a model, or of a rank's share of it, on the CPU, with no matrix read
    yet.
    """
    return network_and_weights(source, switches, share)[0]


def network_and_weights(
    source: Source, switches: Switches = Switches(), share: Share | None = None
) -> tuple[Network, Weights]:
    """Return what `network_of` returns, and the weights that it has asked for."""
    p = Hyperparameters(source.metadata, os.fspath(source.path))
    placement = Placement(CPU, p.integer("block_count", 0))
    weights = Weights(source, placement, DecodeCache(), switches, share)
    return build_network(p, weights), weights


def exchanges_of(block: Block) -> int:
    """Return in how many exchanges the ranks of a split add up what a step gives in a block, or
    gather what sparse gates need of all elements.
    """
    modules = [branch.module for branch in block.branches]
    return sum(not isinstance(m, (LayerInput, AltUpRows)) for m in modules) + sum(
        isinstance(m, GatedFFN) and m.spec.cutoff is not None for m in modules
    )


def sums_of(block: Block) -> int:
    """Return how many partial results the ranks of a split add up in a block. A step adds up those
    of a dense layer and of experts next to it together.
    """
    both = sum(isinstance(branch.module, DenseAndExperts) for branch in block.branches)
    return exchanges_of(block) + both
