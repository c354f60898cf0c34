"""Executors of a decoding step: `executor(frame, h, state)` launches h += f(norm(h)) for h
float32[n, width].
"""

from __future__ import annotations

from typing import Protocol

import torch

from ...cuda_kernels import matvec
from ...cuda_kernels.matvec_plan import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    MATVEC_ADD,
    NORM_MATVEC,
)
from ...cuda_kernels.ops import PackedMatrix, decode_matrix, decode_rows
from ...cuda_kernels.step_attention import AttentionShape, shared_limit
from ...cuda_kernels.step_attention import fits as attention_fits
from ...cuda_kernels.step_router import fits as router_fits
from ..layers.attention import Attention
from ..layers.ffn import GatedFFN
from ..layers.moe import MoE
from ..layers.norm import RMSNorm
from ..linear import Embedding, ExpertLinear, Linear
from ..network import Network
from ..ranges import ranged
from ..state.cache import CacheSettings, KVCache
from ..state.sequence import State
from .context import Context
from .executor import Executor, operation
from .registry import STEP, PlacedBranch, Slow, executor
from .step_frame import STEP_ROWS, Frame


def on_device(
    linear: Linear | ExpertLinear | Embedding,
    context: Context,
    kind: int | None = None,
    slots: int = 1,
) -> PackedMatrix:
    """The packed matrix of a product of this kind, of `slots` experts; without a kind it is only
    decoded. Slow if it has a bias, is on another device, or has no kernel.
    """
    if linear.bias is not None or linear.scale is not None:
        raise Slow(f"{linear.role} has a bias or a scale")
    matrices = linear.matrices if isinstance(linear, ExpertLinear) else [linear.matrix]
    matrix = matrices[0].packed
    if matrix is None or matrix.device != context.device:
        raise Slow(f"{linear.role} is not on {context.device}")
    if matrix.n_matrices != len(matrices):
        raise Slow(f"{linear.role} is not one tensor of all experts")
    if kind is None:
        return matrix
    if not matvec.supported(matrix.type, experts=isinstance(linear, ExpertLinear)):
        raise Slow(f"{linear.role} is {matrix.type}, for which there is no matrix-vector kernel")
    if not matvec.fits(matrix, kind, slots):
        raise Slow(
            f"{linear.role} has rows of {matrix.cols} elements, too many for the shared memory of"
            f" {context.device}"
        )
    return matrix


# of what down reads, all of it in every thread block, and rounds to 8 bits
BETWEEN = torch.bfloat16


class StepExecutor(Protocol):
    """What launches h += f(norm(h)) for one branch. captured: its launches can be captured.
    repeatable: running a step twice at the same position leaves what running it once does.
    """

    branch: PlacedBranch
    captured: bool
    repeatable: bool

    def check(self, state: State) -> None:
        """Slow if this branch cannot run on what a sequence keeps for it."""
        ...

    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None: ...


class StepEnd(Protocol):
    """What launches the embedding at the beginning of a step, or the output at its end."""

    captured: bool

    def __call__(self, frame: Frame, h: torch.Tensor) -> None: ...


class _Executor(Executor):
    captured = True  # its launches can be captured
    repeatable = True  # running a step twice at the same position leaves what running it once does

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, self.layer = branch, branch.layer
        self.norm, self.eps = branch.norm.weight, branch.norm.eps
        if self.norm.device != context.device:
            raise Slow(f"norm is not on {context.device}")

    def check(self, state) -> None:
        """Slow if this layer cannot run on what a sequence keeps for it."""


@executor(STEP, Attention)
class StepAttentionLayer(_Executor):
    """q, k and v in one launch; norms, rotation, cache and attention in one; the output projection
    onto h.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        a: Attention = branch.module
        if a.rope is None or a.q is None or a.k is None or a.v is None:
            raise Slow("no rotation, or no projections for each of query, key and value")
        self.rope = a.rope
        self.qkv = [on_device(linear, context, NORM_MATVEC) for linear in (a.q, a.k, a.v)]
        self.output = on_device(a.output, context, MATVEC_ADD)
        if not a.switches.flash_attention:
            raise Slow("scores in memory (-fa 0)")
        if (a.q_norm is None) != (a.k_norm is None) or (
            a.q_norm is not None and a.k_norm is not None and a.q_norm.eps != a.k_norm.eps
        ):
            raise Slow("head norms of two kinds")
        self.a = a
        self.norms = (
            None if a.q_norm is None else a.q_norm.weight,
            None if a.k_norm is None else a.k_norm.weight,
        )
        self._limit = shared_limit(context.device)
        self._check(a.new_cache(0, context.settings or CacheSettings(), torch.device("cpu")))

    def check(self, state) -> None:
        self._check(state.layers[self.layer])

    def _check(self, cache: KVCache) -> None:
        if not cache.is_whole:
            raise Slow("a cache whose positions do not follow each other")
        if not attention_fits(self._shape(1, cache), self._limit):
            a, types = (
                self.a,
                " and ".join(
                    dict.fromkeys(type.name.lower() for type in (cache.type_k, cache.type_v))
                ),
            )
            sizes = " and ".join(map(str, dict.fromkeys((a.spec.key_length, a.spec.value_length))))
            raise Slow(
                f"{a.spec.group} heads of {sizes} elements to a head of keys, and a"
                f" cache of {types}: no kernel, or too little shared memory for it"
            )

    def _shape(self, n: int, cache: KVCache) -> AttentionShape:
        a = self.a
        return AttentionShape(
            n,
            a.spec.heads // a.spec.kv_heads,
            a.spec.kv_heads,
            a.spec.key_length,
            a.spec.value_length,
            cache.type_k.name,
            cache.type_v.name,
            self.rope.n_rot,
            self.rope.style == "neox",
            a.q_norm is not None,
            cache.hadamard_k,
            cache.hadamard_v,
        )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        a, cache = self.a, state.layers[self.layer]
        q, k, v = outs = [
            frame.buffer(name, m.rows) for name, m in zip(("q", "k", "v"), self.qkv, strict=True)
        ]
        mixed = frame.buffer("mixed", a.spec.heads * a.spec.value_length)
        operation(matvec.norm_matvec, h, self.norm, self.eps, self.qkv, outs)
        eps = 0.0 if a.q_norm is None else a.q_norm.eps
        frame.attention(self._shape(frame.n, cache), cache.capacity)(
            q,
            k,
            v,
            *self.norms,
            eps,
            frame.angles(self.rope),
            cache.k,
            cache.v,
            frame.positions,
            a.spec.scale,
            mixed,
        )
        operation(matvec.matvec_add, mixed, self.output, h)


@executor(STEP, GatedFFN)
class StepFFN(_Executor):
    """Gate and up with the activation in one launch, down onto h."""

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        ffn: GatedFFN = branch.module
        if ffn.gate is None or ffn.up is None:
            raise Slow("gate and up in one matrix")
        self.gate, self.up = (on_device(x, context, GATE_UP) for x in (ffn.gate, ffn.up))
        self.down = on_device(ffn.down, context, MATVEC_ADD)
        quantized = (
            self.gate.type == self.up.type
            and not self.gate.type.is_float
            and not self.down.type.is_float
        )
        self.between = BETWEEN if quantized else torch.float32

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        hidden = frame.buffer("hidden", self.gate.rows, self.between)
        operation(matvec.gate_up, h, self.norm, self.eps, self.gate, self.up, hidden)
        operation(matvec.matvec_add, hidden, self.down, h)


@executor(STEP, MoE)
class StepMoE(_Executor):
    """The choice of experts in one launch, gate and up of all chosen ones in one, their weighted
    sum onto h in one.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        super().__init__(branch, context)
        moe: MoE = branch.module
        if not router_fits(STEP_ROWS, self.norm.numel(), moe.spec.n_experts, moe.spec.n_used):
            raise Slow(
                f"{moe.spec.n_used} of {moe.spec.n_experts} experts, width {self.norm.numel()}"
            )
        self.n_experts, self.n_used, self.reduction, e = (
            moe.spec.n_experts,
            moe.spec.n_used,
            moe.router.reduction,
            moe.experts,
        )
        self.router = float_matrix(moe.router.linear, context)
        self.down = on_device(e.down, context, EXPERT_DOWN, moe.spec.n_used)
        if e.gate_up is not None:
            self.gate, self.up = on_device(e.gate_up, context, EXPERT_GATE_UP), None
        elif e.gate is not None and e.up is not None:
            self.gate = on_device(e.gate, context, EXPERT_GATE_UP)
            self.up = on_device(e.up, context, EXPERT_GATE_UP)
        else:
            raise TypeError("experts need gate and up, or both merged")
        if self.up is not None and self.up.type != self.gate.type:
            raise Slow(
                f"gate and up of experts are {self.gate.type} and {self.up.type}: one kernel reads"
                " both"
            )

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        ids, weights = (
            frame.buffer("experts", self.n_used, torch.int32),
            frame.buffer("expert weights", self.n_used),
        )
        frame.router(self.norm.numel(), self.n_experts, self.n_used, self.reduction)(
            h, self.norm, self.eps, self.router, ids, weights
        )
        hidden = frame.buffer("expert hidden", self.n_used * self.down.cols).view(
            frame.n, self.n_used, -1
        )
        operation(matvec.expert_gate_up, h, self.norm, self.eps, self.gate, self.up, ids, hidden)
        operation(matvec.expert_down_add, hidden, self.down, ids, weights, h)


def float_matrix(linear: Linear, context: Context) -> torch.Tensor:
    """float32[rows, cols] of a matrix that has to be multiplied in float32 (the router's)."""
    return decode_matrix(on_device(linear, context), torch.float32)


class DeviceEmbedding:
    """Rows of the embedding for token ids in device memory. It is the first launch of a step and
    must not be a dependent launch: the draw at the end of the step before writes the token and the
    position, which later launches of this step read before they wait.
    """

    captured = True

    def __init__(self, network: Network, context: Context):
        self.matrix, self.scale = on_device(network.embedding, context), network.embedding_scale

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        decode_rows(self.matrix, frame.sequence.tokens[: frame.n], torch.float32, out=h)
        if self.scale != 1:
            h *= self.scale


class StepOutput:
    """The final norm and the output matrix."""

    captured = True

    def __init__(self, network: Network, context: Context):
        if not isinstance(network.output_norm, RMSNorm) or network.softcap:
            raise Slow("no RMS norm before it, or capped logits")
        self.norm, self.matrix = (
            network.output_norm,
            on_device(network.output, context, NORM_MATVEC),
        )
        if self.norm.weight.device != context.device:
            raise Slow(f"norm is not on {context.device}")

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        operation(
            matvec.norm_matvec,
            h,
            self.norm.weight,
            self.norm.eps,
            [self.matrix],
            [frame.logits[: len(h)]],
        )


class SlowEmbedding:
    captured = False

    def __init__(self, network: Network, context: Context):
        self.network = network

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        h.copy_(self.network.embed(frame.sequence.tokens[: frame.n].long()))


class SlowBranch(Executor):
    """A branch on the reference path, on the device of its block."""

    captured = repeatable = False

    def __init__(self, branch: PlacedBranch):
        self.branch = branch

    def check(self, state) -> None:
        """Takes any."""

    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        branch, device = self.branch, self.branch.device
        h += branch.branch(h.to(device), frame.batch.at(branch.layer, device)).to(h.device)


class StepScaled(Executor):
    """h *= scale, after the branches of a block."""

    captured = repeatable = True

    def __init__(self, branch: PlacedBranch):
        self.branch, self.scale = branch, branch.scale

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        if self.scale is not None:
            h *= self.scale.to(h.device)


class SlowOutput:
    captured = False

    def __init__(self, network: Network, context: Context):
        self.network = network

    def __call__(self, frame: Frame, h: torch.Tensor) -> None:
        network = self.network
        frame.logits[: len(h)].copy_(
            network.logits(network.output_norm(h.to(network.output_device)))
        )
