"""Make the split plan of a network: a pure function of the descriptions of its layers, the shapes
and types of its tensors, and shares.

Heads, hidden columns and experts are given out in units that blocks and interleaved rows allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...formats.source import TensorInfo
from ...formats.tensor_names import OUTPUT
from ..layers.attention import Attention
from ..layers.chosen.attention import BlockAttention
from ..layers.compressed.attention import CompressedAttention
from ..layers.dense_and_experts import DenseAndExperts
from ..layers.ffn import GatedFFN, PlainFFN
from ..layers.layer_input import LayerInput
from ..layers.mla import MLA
from ..layers.moe import MoE
from ..layers.recurrent.delta_net import DeltaNet
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.recurrent.ngrams import Ngrams
from ..layers.recurrent.selective import Selective
from ..layers.recurrent.short_conv import ShortConv
from ..layers.recurrent.state_space import StateSpace
from ..layers.rowwise.altup import AltUpRows
from ..weights.split_plan import LayerShare, SplitPlan, TensorSplit
from .apportion import Apportion, Balanced, Reference, normalized, ranges
from .expert_mode import ExpertChoice
from .mixer_splits import (
    plan_attention,
    plan_compressed,
    plan_delta_net,
    plan_kimi_delta,
    plan_latent,
    plan_selective,
    plan_short_conv,
    plan_state_space,
)
from .row_splits import plan_experts, plan_ffn
from .tensor_splits import COLUMN_STEPS, TensorSplits, least_common

if TYPE_CHECKING:
    from ..network.network import Network

_OUTPUT_ROWS = 16  # the unit of rows of the output matrix


class NoPlanError(UsageError):
    """A model whose layers have no split plan; `-sm layer` runs it."""


def plan_split(
    network: Network,
    tensors: Iterable[TensorInfo],
    shares: Sequence[float],
    *,
    experts: ExpertChoice = "auto",
    reference: bool = False,
    column_steps: Sequence[int] = COLUMN_STEPS,
) -> SplitPlan:
    """Plan the split of a whole network, built on the CPU, over `len(shares)` ranks.

    experts: how expert tensors are split; `auto` chooses for every layer. reference: distribute as
    ik_llama.cpp does. column_steps: units of hidden columns, from the best on.
    UsageError for shares that are not possible, NoPlanError for a kind of layer
    without a plan.
    """
    normal = normalized(shares)
    apportion: Apportion = Reference(normal) if reference else Balanced(normal)
    splits = TensorSplits(tensors, apportion, len(normal), column_steps)
    layers: list[tuple[LayerShare, ...]] = []
    mode: ExpertChoice = "columns" if reference else experts
    for layer, block in enumerate(network.blocks):
        parts = tuple(LayerShare() for _ in normal)
        for branch in block.branches:
            for norm in (branch.norm, branch.post_norm):
                if norm is not None:
                    splits.copy(norm.tensor)
            if branch.streams is not None:
                for name in branch.streams.tensors:
                    splits.copy(name)
            for module in branch.modules:
                match module:
                    case Attention():
                        parts = plan_attention(module, splits, parts, _source(module, layers))
                    case BlockAttention():
                        parts = plan_attention(module.attention, splits, parts)
                        for name in module.indexer.tensors:
                            splits.copy(name)
                    case MLA():
                        parts = plan_latent(module, splits, parts)
                    case CompressedAttention():
                        parts = plan_compressed(module, layer, splits, parts)
                    case DeltaNet():
                        parts = plan_delta_net(module, layer, splits, parts)
                    case KimiDelta():
                        parts = plan_kimi_delta(module, layer, splits, parts)
                    case StateSpace():
                        parts = plan_state_space(module, layer, splits, parts)
                    case Selective():
                        parts = plan_selective(module, layer, splits, parts)
                    case ShortConv():
                        parts = plan_short_conv(module, splits, parts)
                    case GatedFFN() | PlainFFN():
                        parts = plan_ffn(module, splits, parts)
                    case MoE():
                        parts = plan_experts(module, splits, parts, mode)
                    case DenseAndExperts():
                        parts = plan_ffn(module.dense, splits, parts)
                        parts = plan_experts(module.moe, splits, parts, mode)
                    case Ngrams():
                        for name in module.tensors:
                            splits.copy(name)
                    case LayerInput() | AltUpRows():
                        pass  # small; every rank computes all of it
                    case _:
                        raise NoPlanError(
                            f"layer {layer} has a {type(module).__name__}, for which there is no"
                            " split plan"
                        )
        layers.append(parts)
    if network.streams is not None:
        for name in network.streams.tensors:
            splits.copy(name)
    vocabulary = _output(network, splits, normal)
    return SplitPlan(normal, splits.found, tuple(layers), vocabulary)


def _source(
    module: Attention, layers: list[tuple[LayerShare, ...]]
) -> tuple[LayerShare, ...] | None:
    """Return the shares of the layer whose keys and values an attention uses. NoPlanError if it has
    other heads.
    """
    s = module.spec
    if s.kv_from is None:
        return None
    found = layers[s.kv_from]
    heads = max(part.heads[1] for part in found)
    kv_heads = len({kv for part in found for kv in part.kv_heads})
    if (heads, kv_heads) != (s.heads, s.kv_heads):
        raise NoPlanError(
            f"layer {len(layers)} uses the keys and values of layer {s.kv_from}, which has"
            f" {heads} heads for {kv_heads} instead of {s.heads} for {s.kv_heads}"
        )
    return found


def _output(
    network: Network, splits: TensorSplits, shares: Sequence[float]
) -> tuple[tuple[int, int], ...]:
    """Plan the output matrix, whose rows every rank has some of; () if there are too few."""
    name, n = network.output.name, network.n_vocab
    tensor = splits.tensors[name]
    tied = "" if name == OUTPUT else name
    unit = least_common(_OUTPUT_ROWS, tensor.type.group_rows)
    if n // unit < len(shares):
        unit = tensor.type.group_rows
    if n // unit < len(shares):
        splits.found[OUTPUT] = TensorSplit("copy", tied=tied)
        return ()
    # A rank without a share gets a unit as well: it has to have logits to join.
    counts = list(Balanced([max(share, 1e-9) for share in shares]).units(n // unit, ""))
    found = ranges(counts, unit, n)
    splits.found[OUTPUT] = TensorSplit("rows", tuple((r,) for r in found), axis=-2, tied=tied)
    if not tied:
        splits.count(OUTPUT)
        splits.vector("output.bias", [(r,) for r in found])
    return tuple(found)
