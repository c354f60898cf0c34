"""The unit of work of a run: some rows of one tensor, read and decoded once, and encoded and
measured for every output that needs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import IqforgeError
from ...formats.codecs.codec import encode_float
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType, ggml_type
from ..encode import arrange_rows, row_encoder, symmetric_encoder
from ..plan.plan import PlannedTensor
from ..rounding.moments import TensorRounding

# importance(name, shape) -> float32[n_matrices, n_cols], or None for a tensor without importances
ImportanceLookup = Callable[[str, tuple[int, ...]], np.ndarray | None]

# (bytes, sums) of a task. sums: float64[6] = sum e^2, sum x^2, sum w e^2, sum w x^2, max |e|,
# number of values set to zero; None if nothing was measured.
PieceResult = tuple[np.ndarray, np.ndarray | None]

PIECE_ELEMENTS = 1 << 20
DEVICE_PIECE_ELEMENTS = 1 << 25
ROUNDED_ELEMENTS = 1 << 26  # that a GPU rounds with second moments at a time


@dataclass(frozen=True)
class OutputTensor:
    """A planned tensor of one output: `output` and `index` are the numbers of the output and of the
    tensor in its plan.

    importance: where the weights are looked up. done: the output has the tensor from an earlier
    run. rounding: how it is rounded with second moments, None for a search without them.
    """

    output: int
    index: int
    planned: PlannedTensor
    importance: ImportanceLookup | None = None
    done: bool = False
    rounding: TensorRounding | None = None

    @property
    def kept(self) -> bool:
        """Whether the tensor's bytes are copied."""
        return self.planned.kept

    def weights(self) -> np.ndarray | None:
        """Return float32[n_matrices, n_cols], or None without importances."""
        if self.kept or self.importance is None:
            return None
        return self.importance(self.planned.source.name, self.planned.source.shape)


@dataclass(frozen=True)
class PieceTask:
    """The work on a piece for one output: to encode its rows, or to keep their bytes.

    weights: float32[n_cols], or [matrices, n_cols] of a piece for a GPU. encode: None for bytes
    that are kept, and for a piece that a GPU encodes.
    """

    target: OutputTensor
    weights: np.ndarray | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def planned(self) -> PlannedTensor:
        """The tensor as it is planned for the output of this task."""
        return self.target.planned


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a tensor of the source, with a task for each output that needs them.
    `last` marks the last piece of the tensor.

    The rows are of one matrix, unless all tasks keep their bytes. A piece for a GPU has a number,
    counted over the run, and may span matrices.
    """

    source: TensorInfo
    start: int
    stop: int
    tasks: tuple[PieceTask, ...]
    last: bool
    number: int | None = None

    @property
    def n_elements(self) -> int:
        """Elements of the rows."""
        return (self.stop - self.start) * self.source.n_cols

    @property
    def kept(self) -> bool:
        """Whether every output copies the bytes, so that nothing is decoded."""
        return all(task.target.kept for task in self.tasks)


def plain_type(type: GGMLType) -> GGMLType:
    """Return the type whose rows an interleaved type groups, or the type itself."""
    return ggml_type(type.base) if type.base else type


def runs_on_device(tensor: PlannedTensor) -> bool:
    """Return whether a run with devices quantizes the tensor on one. Tensors that keep their type,
    become floats or need no search stay on the CPU.
    """
    return not tensor.kept and not tensor.symmetric and not plain_type(tensor.target.type).is_float


def cut(
    source: Source,
    targets: Sequence[OutputTensor],
    with_devices: bool = False,
    numbers: Iterator[int] | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of all targets in the source's order of tensors, which is that of every
    output.

    The boundaries of pieces depend on the targets alone, including those that are done, which get
    no task. A tensor that one output wants twice is read twice, as outputs are written in order.
    numbers: of pieces for GPUs, if others come before.
    """
    wanted: dict[str, list[OutputTensor]] = {}
    for target in targets:
        wanted.setdefault(target.planned.source.name, []).append(target)
    numbers = itertools.count() if numbers is None else numbers
    for info in source.tensors:
        for group in _passes(wanted.get(info.name, ()), with_devices):
            if all(target.done for target in group):
                continue
            if with_devices and _searched_on_device(group[0]):
                yield from _device_pieces(group, numbers)
            else:
                yield from _cpu_pieces(group, source.path)


def _searched_on_device(target: OutputTensor) -> bool:
    return runs_on_device(target.planned) and target.rounding is None


def _passes(targets: Sequence[OutputTensor], with_devices: bool) -> Iterator[list[OutputTensor]]:
    """Yield targets of one tensor that share the same pieces: no two of one output, and none for
    the CPU together with one for a GPU.
    """
    passes: dict[tuple[int, bool], list[OutputTensor]] = {}
    seen: dict[int, int] = {}
    for target in targets:
        turn = seen[target.output] = seen.get(target.output, -1) + 1
        on_device = with_devices and _searched_on_device(target)
        passes.setdefault((turn, on_device), []).append(target)
    yield from (passes[key] for key in sorted(passes))


def row_group(targets: Sequence[OutputTensor]) -> int:
    """Return the number of rows that pieces of these targets of a tensor are a multiple of."""
    return (
        math.lcm(*(target.planned.target.type.group_rows for target in targets))
        * targets[0].planned.source.type.group_rows
    )


def _cpu_pieces(targets: list[OutputTensor], file: str) -> Iterator[Piece]:
    info = targets[0].planned.source
    large = any(target.rounding is not None and target.rounding.large_pieces for target in targets)
    step = _step(info, row_group(targets), ROUNDED_ELEMENTS if large else PIECE_ELEMENTS)
    if any(target.rounding is not None and target.rounding.whole_matrices for target in targets):
        step = info.n_rows // info.n_matrices
    open_targets = [target for target in targets if not target.done]
    n_matrices = 1 if all(target.kept for target in targets) else info.n_matrices
    rows = max(1, info.n_rows // n_matrices)
    weights = [target.weights() for target in open_targets]
    for first in range(0, info.n_rows, rows):
        tasks = tuple(
            _cpu_task(target, None if w is None else w[first // rows], file, first // rows)
            for target, w in zip(open_targets, weights)
        )
        for start in range(first, first + rows, step):
            stop = min(start + step, first + rows)
            yield Piece(info, start, stop, tasks, stop == info.n_rows)


def _step(info: TensorInfo, group: int, n_elements: int) -> int:
    return max(1, n_elements // info.n_cols // group) * group


def device_spans(info: TensorInfo, group: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last row (exclusive) of each piece of a tensor that a GPU quantizes: rows
    of one matrix, a multiple of `group` of them, or several whole matrices where they are small.
    """
    matrix_rows = info.n_rows // info.n_matrices
    if matrices := DEVICE_PIECE_ELEMENTS // (matrix_rows * info.n_cols):
        step = matrices * matrix_rows
        yield from (
            (start, min(start + step, info.n_rows)) for start in range(0, info.n_rows, step)
        )
        return
    step = _step(info, group, DEVICE_PIECE_ELEMENTS)
    for first in range(0, info.n_rows, matrix_rows):
        yield from (
            (start, min(start + step, first + matrix_rows))
            for start in range(first, first + matrix_rows, step)
        )


def _device_pieces(targets: list[OutputTensor], numbers: Iterator[int]) -> Iterator[Piece]:
    info = targets[0].planned.source
    matrix_rows = info.n_rows // info.n_matrices
    open_targets = [target for target in targets if not target.done]
    weights = [target.weights() for target in open_targets]
    for start, stop in device_spans(info, row_group(targets)):
        matrices = slice(start // matrix_rows, -(-stop // matrix_rows))
        tasks = tuple(
            PieceTask(target, None if w is None else w[matrices])
            for target, w in zip(open_targets, weights)
        )
        yield Piece(info, start, stop, tasks, stop == info.n_rows, next(numbers))


def _cpu_task(
    target: OutputTensor, weights: np.ndarray | None, file: str, matrix: int
) -> PieceTask:
    encode = None if target.kept else _encoder(target, weights, file, matrix)
    return PieceTask(target, weights, encode)


def _encoder(
    output: OutputTensor, importance: np.ndarray | None, file: str, matrix: int
) -> Callable[[np.ndarray], np.ndarray]:
    tensor = output.planned
    target, n_cols = tensor.target.type, tensor.source.n_cols
    plain = plain_type(target)
    if plain.is_float:
        return lambda x: arrange_rows(target, encode_float(plain, x), n_cols)
    try:
        if output.rounding is not None:
            run = output.rounding.encoder(plain, n_cols, matrix)
        elif tensor.symmetric:
            run = symmetric_encoder(n_cols)
        else:
            run = row_encoder(target, n_cols, importance)
    except IqforgeError as error:
        raise type(error)(error.message, file=file, tensor=tensor.source.name) from None

    def encode(x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), plain.row_bytes(n_cols)), dtype=np.uint8)
        run(x, out)
        return arrange_rows(target, out, n_cols)

    return encode
