"""What executors of a decoding step are made of: `executor(frame, h, state)` launches h +=
f(norm(h)) for h float32[n, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ....cuda_kernels.matvec import operands
from ....cuda_kernels.matvec import products as matvec
from ....cuda_kernels.matvec.operands import NextAttention, RowRange
from ....cuda_kernels.matvec.plan import MATVEC_ADD
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.step import between as step_between
from ....cuda_kernels.step.recurrent import StepState
from ...layers.norm import Norm, RMSNorm
from ...state.recurrent import RecurrentState
from ...state.sequence import State
from ...weights.linear import Embedding, Linear
from ...weights.ranges import ranged
from ...weights.stacked_linear import ExpertLinear
from ..common.context import Context
from ..common.executor import Executor, operation
from ..common.held import held
from ..common.registry import Placed, PlacedBranch, Slow
from .frame import Frame, PendingBranch, StepSequence


def on_device(
    linear: Linear | ExpertLinear | Embedding,
    context: Context,
    kind: int | None = None,
    slots: int = 1,
    *,
    biased: bool = False,
) -> PackedMatrix:
    """Return what `held` does, for a product of this kind, of `slots` experts; without a kind it is
    only decoded. biased: the caller adds its bias. Slow if nobody does, or if there is no kernel.
    """
    if linear.bias is not None and not biased:
        raise Slow(f"{linear.role} has a bias")
    matrix = held(linear, context)
    if kind is None:
        return matrix
    if not operands.supported(matrix.type):
        raise Slow(f"{linear.role} is {matrix.type}, for which there is no matrix-vector kernel")
    if not operands.fits(matrix, kind, slots):
        raise Slow(
            f"{linear.role} has rows of {matrix.cols} elements, too many for the shared memory of"
            f" {context.device}"
        )
    return matrix


# of what down reads, all of it in every thread block, and rounds to 8 bits
BETWEEN = torch.bfloat16


class StepExecutor(Protocol):
    """What launches h += f(norm(h)) for one branch. captured: its launches can be captured.
    repeatable: running a step twice at the same position leaves what running it once does. joins:
    it adds what is pending itself (see `Frame`); others get an h with everything added.
    """

    branch: PlacedBranch
    captured: bool
    repeatable: bool
    joins: bool

    def check(self, state: State) -> None:
        """Slow if this branch cannot run on what a sequence keeps for it."""
        ...

    def __call__(self, frame: Frame, h: torch.Tensor, state: State) -> None:
        """Launch the branch for h float32[n, width], in place, and what `state` keeps for it."""
        ...


class StepInput:
    """Products of norm(h), or of h without a norm. An RMS norm is applied within them, a LayerNorm
    in a launch before. What is pending is added first, by the first product if it can.
    """

    def __init__(self, norm: Norm | None, context: Context):
        if norm is not None and norm.weight.device != context.device:
            raise Placed(f"norm is not on {context.device}")
        self.norm = norm

    def __call__(
        self,
        frame: Frame,
        matrices: Sequence[PackedMatrix | RowRange],
        outs: Sequence[torch.Tensor],
        rows: slice = slice(None),
        attention: NextAttention | None = None,
    ) -> None:
        """outs[i] = matrices[i] times norm(h), for these rows of the frame. attention: the launch
        that follows, if it is one.
        """
        norm = self.norm
        if norm is None or isinstance(norm, RMSNorm):
            h, join = frame.joined()
            join = None if join is None else join.rows(rows)
            if norm is None:
                operation(matvec.plain_matvec, h[rows], matrices, outs, join)
                return
            arguments = h[rows], norm.weight, norm.eps, matrices, outs, join, attention
            operation(matvec.norm_matvec, *arguments)
            return
        h = frame.settled()[rows]
        x = frame.buffer("layer normed", h.shape[1])[: len(h)]
        step_between.layer_norm(h, norm.weight, norm.bias, norm.eps, x)
        operation(matvec.plain_matvec, x, matrices, outs)


class StepBranch(Executor):
    """An executor of a branch whose norm, if it has one, is on the device."""

    captured = True  # its launches can be captured
    repeatable = True  # running a step twice at the same position leaves what running it once does
    joins = False

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch, self.layer = branch, branch.layer
        self.device, norm = context.device, branch.branch.norm
        if norm is None:  # only in kinds of layers that `check_description` names
            self.norm: torch.Tensor = None  # pyright: ignore[reportAttributeAccessIssue]
            self.eps = 0.0
            return
        self.norm, self.eps = norm.weight, norm.eps
        if self.norm.device != context.device:
            raise Placed(f"norm is not on {context.device}")

    def check(self, state) -> None:
        """Slow if this layer cannot run on what a sequence keeps for it."""


class StepRecurrent(StepBranch):
    """An executor of a layer with a recurrent state. The state is updated in place, or moves to and
    fro between its own memory and a copy that the sequence keeps for its steps.

    place: the number of what a sequence keeps for it; None for that of the layer.
    """

    repeatable = False

    def __init__(self, branch: PlacedBranch, context: Context, place: int | None = None):
        super().__init__(branch, context)
        self.place = self.layer if place is None else place

    def check(self, state: State) -> None:
        self.state(state)

    def state(self, state: State) -> RecurrentState:
        """Return what a sequence keeps for this layer."""
        found = state.layers[self.place]
        if not isinstance(found, RecurrentState):
            raise Slow("no recurrent state")
        return found

    def places(self, frame: Frame, state: State) -> StepState:
        """Return what kernels read and update of a sequence that a frame is a step of."""
        held = self.state(state)
        other = self.other(state, frame.sequence) if frame.alternates else None
        return StepState(held.inputs, held.memory, other, frame.positions, frame.sequence.begun)

    def other(self, state: State, sequence: StepSequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the second place for the state of a sequence."""
        key, held = ("recurrent", self.place), self.state(state)
        if key not in sequence.kept:
            sequence.kept[key] = torch.empty_like(held.inputs), torch.empty_like(held.memory)
        return sequence.kept[key]  # pyright: ignore[reportReturnType]  what is under this key


class StepSum:
    """h += post_norm(W x + bias) for the last product of a branch. A sum that only has a norm is
    left pending.
    """

    def __init__(self, linear: Linear, branch: PlacedBranch, context: Context):
        self.matrix = on_device(linear, context, MATVEC_ADD, biased=True)
        self.bias, self.post_norm = linear.bias, branch.post_norm

    @property
    def leaves_pending(self) -> bool:
        """Return whether the sum is left pending."""
        return self.post_norm is not None and self.bias is None

    def __call__(self, frame: Frame, x: torch.Tensor, h: torch.Tensor) -> None:
        """Launch it for x[n, cols] as `matvec_add` takes it, and h float32[n, width]."""
        h = frame.onto(h)
        norm = self.post_norm
        if norm is None:
            operation(matvec.matvec_add, x, self.matrix, h, self.bias)
        elif self.leaves_pending:
            delta = frame.buffer("delta", self.matrix.rows)
            operation(matvec.matvec_set, x, self.matrix, delta)
            frame.pending = PendingBranch(delta, norm.weight, norm.eps)
        else:
            sum = frame.zeros("sum", self.matrix.rows)
            operation(matvec.matvec_add, x, self.matrix, sum)
            step_between.add_normed(sum, h, norm.weight, norm.eps, bias=self.bias)


class SlowBranch(Executor):
    """A branch on the reference path, on the device of its block."""

    captured = repeatable = joins = False

    def __init__(self, branch: PlacedBranch):
        self.branch = branch

    def check(self, state) -> None:
        """Takes any."""

    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        branch, device = self.branch, self.branch.device
        h += branch.branch(h.to(device), frame.batch.at(branch.layer, device)).to(h.device)


class StepScaled(Executor):
    """h *= scale, after the branches of a block."""

    captured = repeatable = joins = True

    def __init__(self, branch: PlacedBranch):
        self.branch = branch
        self.scale = 1.0 if branch.scale is None else float(branch.scale)

    def check(self, state) -> None:
        """Takes any."""

    @ranged
    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        frame.scaled(self.scale)
