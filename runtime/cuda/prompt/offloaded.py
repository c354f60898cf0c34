"""Experts that are on the CPU, for many rows: they are copied to the GPU layer by layer, while the
layers before run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ....cuda_kernels.common.gating import ExpertTerms
from ....cuda_kernels.layouts.table import plain_type
from ....cuda_kernels.packed.matrix import PackedMatrix, packable, packed_bytes
from ....cuda_kernels.packed.pack import pack_into
from ...layers.batch import Batch
from ...layers.moe import MoE
from ...weights.encoded import Matrix, Stacked
from ...weights.stacked_linear import ExpertLinear
from ..common.context import Context
from ..common.expert_terms import terms_of
from ..common.held import on_cpu
from ..common.registry import PROMPT, PlacedBranch, Slow, executor
from .common.graphs import Stage
from .common.stream import Stream
from .locked import LockedMemory, Pieces
from .moe import PromptMoE

_Event = torch.cuda.Event | torch.Event
# With fewer rows, products on the CPU take less time than copies of all experts.
LEAST_ROWS = 32
_PLACES = 2


@executor(PROMPT, MoE)
def prompt_moe(branch: PlacedBranch, context: Context) -> PromptMoE:
    """Return the executor of experts, wherever they are."""
    return (PromptOffloadedMoE if on_cpu(branch.module, context) else PromptMoE)(branch, context)


@dataclass
class _Layer:
    """The experts of a layer: where they are copied to, and what is copied."""

    place: int
    copies: list[tuple[PackedMatrix, Matrix]] = field(default_factory=list)


class ExpertCopies:
    """Copies of the experts of layers, in two places of a device in turn. say: gets a line about
    memory that is page-locked, or why it is not.
    """

    def __init__(self, device: torch.device, say: Callable[[str], None] | None = None):
        self.device, self._say = device, say
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._layers: list[_Layer] = []
        self._held: list[int | None] = [None] * _PLACES  # the layer that is in each place, or comes
        self._coming: dict[int, Future[_Event]] = {}
        # What is to be awaited before a place is written to.
        self._free: list[_Event | None] = [None] * _PLACES
        self._locked = LockedMemory(device)
        self._pieces = Pieces(device)
        self._stream = torch.cuda.Stream(device)
        # One thread: memory is locked, while more is read, before the first copy.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="experts")

    def new_layer(self) -> int:
        """Return the number of one more layer."""
        self._layers.append(_Layer(len(self._layers) % _PLACES))
        return len(self._layers) - 1

    def drop_layer(self) -> None:
        """Forget the last layer."""
        self._layers.pop()

    def place(self, number: int, matrix: Matrix, n: int) -> PackedMatrix:
        """Return where the n matrices of a tensor will be, once `take` has returned. Slow if the
        device cannot hold them.
        """
        layer, rows = self._layers[number], matrix.kept_tensor()
        if rows is None or not packable(rows.type, rows.n_cols):
            raise Slow(f"experts of type {matrix.tensor.type} cannot be copied")
        size = packed_bytes(rows.type, matrix.rows, matrix.cols, n)
        key = layer.place, len(layer.copies)
        if key not in self._memory or self._memory[key].numel() < size:
            try:  # layers before keep what was too small
                self._pieces.allocate()
                self._memory[key] = torch.zeros(size, dtype=torch.uint8, device=self.device)
            except torch.cuda.OutOfMemoryError:
                raise Slow(f"{self.device} has no memory for copies of experts") from None
            self._free[layer.place] = torch.cuda.current_stream(self.device).record_event()
        data = self._memory[key][:size]
        packed = PackedMatrix(plain_type(rows.type), matrix.rows, matrix.cols, n, data)
        layer.copies.append((packed, matrix))
        self._copier.submit(self._locked.lock, matrix.tensor.name, rows.data)
        return packed

    def take(self, number: int) -> None:
        """Let the current stream wait for the experts of a layer, and begin to copy those of the
        next.
        """
        self._begin(number)
        if (coming := self._coming.get(number)) is not None:
            try:
                copied = coming.result()
            except BaseException:
                self._held[self._layers[number].place] = None  # the next pass tries again
                raise
            torch.cuda.current_stream(self.device).wait_event(copied)
            self._tell()
        if number + 1 < len(self._layers):
            self._begin(number + 1)

    def release(self, number: int) -> None:
        """The products that read the experts of a layer have been launched."""
        place = self._layers[number].place
        self._free[place] = torch.cuda.current_stream(self.device).record_event()

    def _tell(self) -> None:
        """Say once what is locked. A copy has come, so that everything has been tried before."""
        say, self._say = self._say, None
        if say is None:
            return
        size = f"{self._locked.n_bytes / 2**30:.1f} GiB"
        if self._locked.refused:
            say(
                f"experts on the CPU: {size} are page-locked, others are copied to {self.device}"
                f" through buffers ({self._locked.refused})"
            )
        else:
            say(f"experts on the CPU: {size} are page-locked")

    def _begin(self, number: int) -> None:
        place = self._layers[number].place
        if self._held[place] == number:
            return
        if (before := self._held[place]) is not None:
            self._coming.pop(before, None)
        self._held[place] = number
        self._coming[number] = self._copier.submit(self._copy, number, self._free[place])

    def _copy(self, number: int, free: _Event | None) -> _Event:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if free is not None:
                self._stream.wait_event(free)
            for packed, matrix in self._layers[number].copies:
                rows = matrix.kept_tensor()
                if rows is None:
                    raise RuntimeError(f"{matrix.tensor.name} is no longer in memory")
                if self._locked.lock(matrix.tensor.name, rows.data):
                    self._pieces.pack_into(packed, rows.type, rows.data, self._stream)
                else:
                    pack_into(packed, rows.type, [rows.data])
            return self._stream.record_event()

    def close(self) -> None:
        """End what copies, and unlock memory."""
        self._copier.shutdown(cancel_futures=True)
        self._locked.close()


class PromptOffloadedMoE(PromptMoE):
    """`PromptMoE` with experts that are copied to the device for each pass, or for several that go
    through the layers together; few rows are on the reference path.
    """

    def __init__(self, branch: PlacedBranch, context: Context):
        self._copies = context.once(
            "expert copies", lambda: ExpertCopies(context.device, context.verbose)
        )
        self._number = self._copies.new_layer()
        try:
            super().__init__(branch, context)
        except Slow:
            self._copies.drop_layer()
            raise

    def packed(self, linear: ExpertLinear) -> list[tuple[PackedMatrix, ExpertTerms]]:
        """Return where the matrices of all experts will be. Merged ones are copied apart."""
        first, n = linear.matrices[0], len(linear.matrices)
        parts = first.matrices if isinstance(first, Stacked) else [first]
        if not all(isinstance(x, Matrix) for x in parts) or len(linear.tensors) != len(parts):
            raise Slow(f"{linear.role} is in several tensors")
        terms, found, at = terms_of(linear, self.context), [], 0
        for part in parts:
            if part.cols % 8 or part.rows % 8:
                raise Slow(f"{linear.role} is {part.rows} x {part.cols}, not multiples of 8")
            bias = terms.bias
            if bias is not None and len(parts) > 1:
                bias = bias[:, at : at + part.rows].contiguous()
            place = self._copies.place(self._number, part, n)
            found.append((place, replace(terms, bias=bias)))
            at += part.rows
        return found

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(False, self._run)]

    def leaves(self, stream: Stream) -> bool:
        """Return whether these rows are too few to copy experts: then they stay on the CPU."""
        return len(stream.h) < LEAST_ROWS and not stream.accompanied

    @contextmanager
    def present(self) -> Iterator[None]:
        """While it is open, the experts of this layer are on the device."""
        self._copies.take(self._number)
        try:
            yield
        finally:
            self._copies.release(self._number)
