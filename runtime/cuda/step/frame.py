"""Memory of a step: what layers share, and what belongs to one sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from ....cuda_kernels.attention.shape import AttentionShape
from ....cuda_kernels.attention.step import StepAttention
from ....cuda_kernels.common.routing import Routing
from ....cuda_kernels.matvec.operands import Join
from ....cuda_kernels.step import between as step_between
from ....cuda_kernels.step.router import StepRouter
from ....cuda_kernels.step.sample import step_angles
from ...layers.batch import Batch
from ...layers.rope import Rope
from ...network.network import Network
from ..common.context import Context

if TYPE_CHECKING:
    from .links import Links

STEP_ROWS = 8  # new rows of a sequence at a time, at most


class StepSequence:
    """Inputs of the steps of one sequence, in fixed places: token ids int64[rows] and positions
    int32[rows] on the device; `history`, in host memory that the device writes to, has the token
    drawn for each position (-1: the logits were not finite); `seed` int64[1]; `begun` int32[1], the
    first position since `begin`, which the host has as `start`.

    `instead`: what replaces executors, by their number, that cannot use the caches of the sequence;
    `captures`: whether its steps can be captured. Graphs, and what is sized by the capacity
    (`kept`), live as long as the sequence. `alternates`: steps that draw a token leave recurrent
    states of the step before as they are.
    """

    def __init__(
        self,
        capacity: int,
        rows: int,
        device: torch.device,
        instead: Mapping[int, Any],
        captures: bool,
    ):
        self.instead, self.captures = instead, captures
        self.start, self.alternates = 0, False
        self._host = np.zeros(_seed_at(rows) + 16, dtype=np.uint8)
        self._device = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self._tokens, self._positions, self._seed, self._begun = (
            part.numpy() for part in _fields(torch.from_numpy(self._host), rows)
        )
        self.tokens, self.positions, self.seed, self.begun = _fields(self._device, rows)
        self.history = torch.zeros(capacity + 1, dtype=torch.int32, pin_memory=True)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.seen: set[tuple] = set()
        self.kept: dict[tuple, object] = {}

    def begin(self, tokens: Sequence[int] | torch.Tensor, start: int, seed: int = 0) -> None:
        """The next step takes these tokens at positions from `start`; later steps take what the
        step before drew.
        """
        n = len(tokens)
        self._tokens[:n] = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens
        self._positions[:n] = range(start, start + n)
        self.start = self._begun[0] = start
        self._seed[0] = seed - 2**64 if seed >= 2**63 else seed
        # Pageable and small: copied before this returns.
        self._device.copy_(torch.from_numpy(self._host), non_blocking=True)


def _seed_at(rows: int) -> int:
    return rows * 8 + -(-rows * 4 // 8) * 8


def _fields(data: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Token ids, positions, the seed, and the first position."""
    at = _seed_at(rows)
    return (
        data[: 8 * rows].view(torch.int64),
        data[8 * rows : 12 * rows].view(torch.int32),
        data[at : at + 8].view(torch.int64),
        data[at + 8 : at + 12].view(torch.int32),
    )


@dataclass(frozen=True)
class PendingBranch:
    """What is still to be added to the residual stream h: it becomes (h + post_norm(delta)) *
    scale.
    """

    delta: torch.Tensor
    weight: torch.Tensor
    eps: float
    scale: float = 1.0


class Frame:
    """Buffers of up to `rows` rows that layers share, as they run one after the other on one
    stream. Their addresses never change, as captured launches contain them.

    `h` float32[n, width] is the residual stream. A branch with a norm after it leaves its result in
    `pending`; the first product of the next branch adds it (`joined`), or a launch of its own does
    (`settled`). The stream alternates between two buffers, as every block of such a product reads
    the old one.
    """

    def __init__(self, network: Network, context: Context, rows: int):
        self.context, self.device, self.rows = context, context.device, rows
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._kernels: dict[tuple, Any] = {}
        self._sized: WeakValueDictionary[tuple, StepAttention] = WeakValueDictionary()
        self._turned: set[int] = set()
        self.n, self.alternates, self.width = 0, False, network.width
        self.pending: PendingBranch | None = None
        self._place = 0  # of the residual stream
        self._inputs: torch.Tensor | None = None
        # What a branch that runs adds to if it gives a part of a sum over ranks.
        self.part: torch.Tensor | None = None
        self.links: Links | None = None  # to the other ranks
        # Both are set from `begin` to `end`.
        self.batch: Batch = None  # pyright: ignore[reportAttributeAccessIssue]
        self.sequence: StepSequence = None  # pyright: ignore[reportAttributeAccessIssue]
        self.logits = torch.empty(rows, network.n_vocab, device=self.device)

    def begin(
        self, sequence: StepSequence, n: int, batch: Batch | None, alternates: bool = False
    ) -> None:
        """A step of n rows is being launched. `batch` is for modules that run on the reference
        path. alternates: recurrent states go from one place to another.
        """
        self.sequence, self.n, self.alternates = sequence, n, alternates
        self.batch = batch  # pyright: ignore[reportAttributeAccessIssue]  see there
        self._turned.clear()
        self.pending, self._place, self._inputs = None, 0, None

    @property
    def h(self) -> torch.Tensor:
        """Return the residual stream float32[n, width], to which something may be pending."""
        return self.buffer(f"h {self._place}", self.width)

    def joined(self) -> tuple[torch.Tensor, Join | None]:
        """Return what the next product has to read, and what it has to add first. `h` is then what
        that product writes.
        """
        h, pending = self.h, self.pending
        if pending is None:
            return h, None
        self._place, self.pending = 1 - self._place, None
        return h, Join(pending.delta, pending.weight, pending.eps, self.h, pending.scale)

    def settled(self) -> torch.Tensor:
        """Add what is pending, and return the residual stream."""
        h, pending = self.h, self.pending
        if pending is not None:
            self.pending = None
            step_between.add_normed(pending.delta, h, pending.weight, pending.eps)
            if pending.scale != 1:
                step_between.scale(h, pending.scale)
        return h

    def scaled(self, factor: float) -> None:
        """Multiply the residual stream."""
        if self.pending is None:
            step_between.scale(self.h, factor)
        else:
            self.pending = replace(self.pending, scale=self.pending.scale * factor)

    def end(self) -> None:
        """The whole step is launched: what belongs to its sequence is not kept here."""
        self.batch = self.sequence = None  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def positions(self) -> torch.Tensor:
        """Return int32[n] on the device, the positions of the step's tokens."""
        return self.sequence.positions[: self.n]

    def buffer(self, name: str, n_cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return [n, n_cols], the same memory for every call with this name and size."""
        key = (name, n_cols, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.rows, n_cols, dtype=dtype, device=self.device)
        return self._buffers[key][: self.n]

    def onto(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the result of the current branch is added to: h float32[n, width], or `part`
        for a part of a sum over ranks.
        """
        return h if self.part is None else self.part

    def new_layer_inputs(self, n_layers: int, length: int) -> torch.Tensor:
        """Return float32[n_layers, n, length] for what `layer_inputs` returns in this step."""
        self._inputs = self.buffer("layer inputs", n_layers * length).view(n_layers, self.n, length)
        return self._inputs

    def layer_inputs(self) -> torch.Tensor:
        """Return float32[layers, n, length], what an architecture computes from the tokens."""
        if self._inputs is None and self.batch is not None and self.batch.inputs is not None:
            self._inputs = self.batch.inputs.to(self.device).transpose(0, 1).contiguous()
        if self._inputs is None:
            raise TypeError("the step has no inputs of layers")
        return self._inputs

    def zeros(self, name: str, n_cols: int) -> torch.Tensor:
        """Return what `buffer` returns, for float32 that is 0 before the first step. Whoever uses
        it leaves zeros.
        """
        key = (f"zeros {name}", n_cols, torch.float32)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(self.rows, n_cols, device=self.device)
        return self._buffers[key][: self.n]

    def angles(self, rope: Rope) -> torch.Tensor:
        """Return float32[n, n_rot/2, 2] of the new positions. The first call in a step launches the
        kernel.
        """
        out = self.buffer(f"angles {id(rope)}", rope.n_rot).view(self.n, -1, 2)
        if id(rope) not in self._turned:
            self._turned.add(id(rope))
            rates = self.once(("rates", id(rope)), lambda: rope.rates.to(self.device))
            step_angles(rates, rope.magnitude, self.positions, out)
        return out

    def attention(self, shape: AttentionShape, capacity: int) -> StepAttention:
        """Return the kernel that sequences of this capacity share, which lives as long as one of
        them: its scratch memory grows with the capacity.
        """
        found = self._sized.get(key := (shape, capacity))
        if found is None:
            found = self._sized[key] = StepAttention(shape, capacity, self.device)
        self.sequence.kept[key] = found
        return found

    def router(
        self,
        width: int,
        n_experts: int,
        n_used: int,
        reduction: tuple[int, float] | None,
        routing: Routing,
    ) -> StepRouter:
        """Return the router for these sizes, made once. reduction: `ser` of the context."""
        return self.once(
            ("router", self.n, width, n_experts, n_used, reduction, routing),
            lambda: StepRouter(self.n, width, n_experts, n_used, self.device, reduction, routing),
        )

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the first call with `key`."""
        if key not in self._kernels:
            self._kernels[key] = make()
        return self._kernels[key]
