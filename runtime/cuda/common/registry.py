"""Which executor runs which module on the fast path.

`PROMPT[class]` and `STEP[class]` are factories: `(branch, context) -> executor`. A factory that
cannot run this module (a bias, a weight on another device, a shape without kernels) raises `Slow`
with the reason, and the module runs on the reference path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...layers.absent import AbsentMixer, AbsentRows
from ...layers.attention import Attention
from ...layers.block import AttentionAndFFN, AttentionAndStateSpace, Block, Branch
from ...layers.dense_and_experts import DenseAndExperts
from ...layers.ffn import GatedFFN, PlainFFN
from ...layers.layer_input import LayerInput
from ...layers.mla import MLA, has_more
from ...layers.moe import MoE
from ...layers.norm import HeadLayerNorm, LayerNorm, Norm, RMSNorm
from ...layers.recurrent.delta_net import DeltaNet
from ...layers.recurrent.kimi_delta import KimiDelta
from ...layers.recurrent.ngrams import Ngrams
from ...layers.recurrent.short_conv import ShortConv
from ...layers.recurrent.state_space import StateSpace
from ...layers.rowwise.altup import AltUpRows
from .context import Context
from .expert_terms import gating_of

_Factory = TypeVar("_Factory", bound=Callable)

PROMPT: dict[type, Callable] = {}
STEP: dict[type, Callable] = {}


class Slow(Exception):
    """This module has no fast path; the message says why. It never reaches a user."""

    placed = False  # whether the reason is where placements have put something


class Placed(Slow):
    """What it needs is on another device, as placements say."""

    placed = True


@dataclass(frozen=True)
class PlacedBranch:
    """A branch of the residual stream, its layer, and the device on which it computes.

    scale: the number that multiplies the stream after it (None: 1).
    """

    layer: int
    branch: Branch
    device: torch.device
    scale: torch.Tensor | None = None

    @property
    def module(self) -> Any:
        """Return what the branch computes."""
        return self.branch.module

    @property
    def norm(self) -> Norm:
        """The norm before the module, which `choose` has checked."""
        return self.branch.norm  # pyright: ignore[reportReturnType]  see there

    @property
    def is_summed(self) -> bool:
        """Return whether the module gives a part of a result that is summed over ranks."""
        return self.branch.sum is not None

    @property
    def post_norm(self) -> Norm | None:
        """The norm that an executor applies to its result: none if a sum over ranks comes first."""
        return None if self.is_summed else self.branch.post_norm

    @property
    def name(self) -> str:
        """Return what notes about slow layers call it."""
        return f"blk.{self.layer} {type(self.module).__name__}"


def executor(table: dict[type, Callable], module: type) -> Callable[[_Factory], _Factory]:
    """Declare the decorated class or function as the executor of modules of this class."""

    def declare(factory: _Factory) -> _Factory:
        if module in table:
            raise RuntimeError(f"two executors for {module.__name__}")
        table[module] = factory
        return factory

    return declare


def placed(blocks: Sequence[Block], layers: Iterable[int] | None = None) -> list[PlacedBranch]:
    """Return the branches of these layers in order (None: of all)."""
    found = []
    for layer in range(len(blocks)) if layers is None else layers:
        block = blocks[layer]
        last = len(block.branches) - 1
        found += [
            PlacedBranch(layer, branch, block.device, block.output_scale if i == last else None)
            for i, branch in enumerate(block.branches)
        ]
    return found


def choose(table: dict[type, Callable], branch: PlacedBranch, context: Context) -> Any | None:
    """Return the executor of a branch, or None (reported to `context`) if its module has to run on
    the reference path.
    """
    factory = table.get(type(branch.module))
    try:
        if branch.device != context.device:
            raise Placed(f"the layer works on {branch.device}")
        check_description(branch.branch)
        if factory is None:
            raise Slow("no kernels for this kind of layer")
        return factory(branch, context)
    except Slow as reason:
        context.report(type(branch.module).__name__, reason, branch.layer)
        return None


def choose_all(
    table: dict[type, Callable], branches: Sequence[PlacedBranch], context: Context
) -> list[Any | None]:
    """Return what `choose` returns for each branch. Layers with attention to chosen positions hand
    the choice on: one on the reference path leaves the others there.
    """
    found = [choose(table, branch, context) for branch in branches]
    sparse = [i for i, x in enumerate(branches) if isinstance(x.module, MLA) and x.module.top_k]
    if any(found[i] is None for i in sparse):
        for i in sparse:
            if found[i] is not None:
                reason = "positions are chosen on the reference path"
                context.report("MLA", reason, branches[i].layer)
                found[i] = None
    return found


def check_description(branch: Branch) -> None:
    """`Slow` for what no kernels evaluate yet, whatever the device and the types of weights."""
    module = branch.module
    if isinstance(module, AltUpRows):
        raise Slow("no kernels for this kind of layer")
    if branch.streams is not None or isinstance(module, Ngrams):
        raise Slow("several residual streams")
    own_norms = isinstance(module, (DenseAndExperts, LayerInput))
    # What has kernels for the stream as it is, with the norm after it alone.
    any_norm = isinstance(module, (Attention, GatedFFN, AbsentMixer, AbsentRows))
    centered = Attention, AttentionAndFFN, GatedFFN, PlainFFN, MoE, AbsentMixer, AbsentRows
    if (own_norms != (branch.norm is None) and not any_norm) or (
        isinstance(branch.norm, LayerNorm) and not isinstance(module, centered)
    ):
        raise Slow("no norm before it, or another one")
    if branch.post_norm is not None and not isinstance(branch.post_norm, RMSNorm):
        raise Slow("a norm after it that is no RMS norm")
    if isinstance(module, Attention):
        if isinstance(module.q_norm, HeadLayerNorm):
            raise Slow("norms of heads that subtract the mean")
        return
    if isinstance(module, AttentionAndFFN):
        _check_side_by_side(branch, module)
    elif isinstance(module, AttentionAndStateSpace):
        for part in (module.attention, module.states):
            check_description(Branch(branch.norm, part, branch.post_norm))
    elif isinstance(module, DenseAndExperts):
        _check_dense_and_experts(module)
    elif isinstance(module, LayerInput):
        if module.spec.activation not in ("silu", "gelu", "gelu_erf"):
            raise Slow(f"activation {module.spec.activation}")
    elif isinstance(module, MoE):
        if isinstance(module.shared, GatedFFN):
            _check_gating(module.shared)
        _check_experts(module)
    elif isinstance(module, GatedFFN):
        _check_gating(module, isinstance(branch.norm, LayerNorm))
    elif isinstance(module, PlainFFN):
        if module.spec.activation not in ("silu", "gelu", "gelu_erf", "relu_squared", "xielu"):
            raise Slow(f"activation {module.spec.activation}")
    elif isinstance(module, MLA) and has_more(module):
        raise Slow("sinks, or gates of elements, of latent attention")
    elif isinstance(module, DeltaNet) and module.spec.sigmoid:
        raise Slow("gates of delta nets by a sigmoid")
    elif not isinstance(
        module, (DeltaNet, KimiDelta, ShortConv, StateSpace, MLA, AbsentMixer, AbsentRows)
    ):
        raise Slow("no kernels for this kind of layer")


def _check_side_by_side(branch: Branch, m: AttentionAndFFN) -> None:
    parts = type(m.attention), type(m.ffn)
    others = GatedFFN, MoE, AbsentRows
    if parts[0] not in (Attention, AbsentMixer) or parts[1] not in others:
        raise Slow("{} and {} side by side".format(*(part.__name__ for part in parts)))
    if branch.post_norm is not None:
        raise Slow("a norm after attention and feed-forward side by side")
    check_description(Branch(branch.norm, m.attention))
    if isinstance(m.ffn, GatedFFN):
        _check_gating(m.ffn, isinstance(branch.norm, LayerNorm))
    elif isinstance(m.ffn, MoE):
        check_description(Branch(branch.norm, m.ffn))


def _check_dense_and_experts(m: DenseAndExperts) -> None:
    check_description(Branch(m.norm, m.dense, m.post_norm))
    if m.moe is not None:
        check_description(Branch(m.expert_norm, m.moe, m.expert_post_norm))
    elif m.sum is None:
        raise Slow("no experts")


def _check_gating(m: GatedFFN, centered: bool = False) -> None:
    """Products join gate and up in every known way. After biases, and where products do not norm
    their input as it is centered, they are joined apart, in fewer ways.
    """
    apart = centered or any(x is not None and x.bias is not None for x in (m.gate_up, m.gate, m.up))
    spec = m.spec
    if spec.cutoff is not None:
        raise Slow("a gate of which few elements are left")
    known = spec.activation in ("silu", "gelu", "gelu_erf") and not spec.limit
    if not (known if apart else gating_of(spec).is_known):
        raise Slow(f"activation {spec.activation}" + (" within a limit" if spec.limit else ""))


def _check_experts(m: MoE) -> None:
    # The softmax of the chosen logits is that of all, normalized, if logits alone decide.
    by_logits = m.router.bias is None and m.spec.groups == 1
    beyond = {
        "scores of the chosen experts by more than logits": m.spec.score == "selected"
        and not by_logits,
        f"scores by {m.spec.score}": m.spec.score not in ("softmax", "sigmoid", "selected"),
        f"activation {m.experts.spec.activation}": not gating_of(m.experts.spec).is_known,
    }
    if found := [name for name, has in beyond.items() if has]:
        raise Slow(" and ".join(found))
