"""The unit of work of a run: some rows of one tensor, read and decoded once, encoded and measured
for every output that wants them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import IqforgeError, NonFiniteError
from ...formats.codec import decode, encode_float
from ...formats.source import Source, TensorInfo
from ...formats.types import ggml_type
from ..encode import (
    arrange_rows,
    refuse_non_finite,
    row_encoder,
    symmetric_encoder,
    zero_non_finite,
)
from ..plan.plan import PlannedTensor

if TYPE_CHECKING:
    from ..cuda.pieces import DeviceWorkers

# importance(name, shape) -> float32[n_matrices, n_cols], or None where nothing is known of the
# tensor
ImportanceLookup = Callable[[str, tuple[int, ...]], np.ndarray | None]

PIECE_ELEMENTS = 1 << 20
# Largest magnitude that surely fits when nothing is measured: scales are F16, and none is more than
# a few times its largest value.
_SURELY_FITS = {"F16": 65504.0, "BF16": 3e38, "F32": float("inf")}
_SURELY_FITS_QUANTIZED = 8192.0


@dataclass(frozen=True)
class Target:
    """A planned tensor of one output: `output` and `index` are the numbers of the output and of the
    tensor in its plan.

    importance: where weights are looked up. done: the output has the tensor from an earlier run.
    """

    output: int
    index: int
    planned: PlannedTensor
    importance: ImportanceLookup | None = None
    done: bool = False

    @property
    def kept(self) -> bool:
        return self.planned.kept

    def weights(self) -> np.ndarray | None:
        """float32[n_matrices, n_cols], None without importances."""
        return (
            None
            if self.kept or self.importance is None
            else self.importance(self.planned.source.name, self.planned.source.shape)
        )


@dataclass(frozen=True)
class Part:
    """What one target takes of a piece: the rows encoded, or their bytes (encode is None).

    weights: float32[n_cols], or [matrices, n_cols] of a piece for a GPU, which has no encode
    either.
    """

    target: Target
    weights: np.ndarray | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def planned(self) -> PlannedTensor:
        return self.target.planned


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of a tensor of the source, for one or several targets; `last` ends these
    targets.

    The rows are of one matrix, unless all targets keep their bytes. A piece for a GPU has a number,
    counted over the run, and may span matrices.
    """

    source: TensorInfo
    start: int
    stop: int
    parts: tuple[Part, ...]
    last: bool
    number: int | None = None

    @property
    def kept(self) -> bool:
        return all(part.target.kept for part in self.parts)


def cut(
    source: Source, targets: Sequence[Target], workers: DeviceWorkers | None = None
) -> Iterator[Piece]:
    """The pieces of all targets: in the source's order of tensors, and so in that of every output.

    Where pieces begin depends on the targets alone, also on those that are done, which get no
    parts. A tensor that one output wants twice is read twice, as outputs are written in order.
    """
    wanted: dict[str, list[Target]] = {}
    for target in targets:
        wanted.setdefault(target.planned.source.name, []).append(target)
    numbers = itertools.count()
    for info in source.tensors:
        for group in _passes(wanted.get(info.name, ()), workers):
            if all(target.done for target in group):
                continue
            if workers is not None and workers.takes(group[0].planned):
                yield from _device_pieces(group, workers, numbers)
            else:
                yield from _pieces(group, source.path)


def _passes(targets: Sequence[Target], workers: DeviceWorkers | None) -> Iterator[list[Target]]:
    """Targets of one tensor that are made of the same pieces: no two of one output, and none for
    the CPU with one for a GPU.
    """
    passes: dict[tuple[int, bool], list[Target]] = {}
    seen: dict[int, int] = {}
    for target in targets:
        turn = seen[target.output] = seen.get(target.output, -1) + 1
        passes.setdefault((turn, workers is not None and workers.takes(target.planned)), []).append(
            target
        )
    yield from (passes[key] for key in sorted(passes))


def row_group(targets: Sequence[Target]) -> int:
    """Rows that pieces of these targets of one tensor must be a multiple of."""
    return (
        math.lcm(*(target.planned.target.type.group_rows for target in targets))
        * targets[0].planned.source.type.group_rows
    )


def _pieces(targets: list[Target], file: str) -> Iterator[Piece]:
    info = targets[0].planned.source
    step = _step(info, row_group(targets), PIECE_ELEMENTS)
    open_targets = [target for target in targets if not target.done]
    n_matrices = 1 if all(target.kept for target in targets) else info.n_matrices
    rows = max(1, info.n_rows // n_matrices)
    weights = [target.weights() for target in open_targets]
    for first in range(0, info.n_rows, rows):
        parts = tuple(
            _part(target, None if w is None else w[first // rows], file)
            for target, w in zip(open_targets, weights)
        )
        for start in range(first, first + rows, step):
            stop = min(start + step, first + rows)
            yield Piece(info, start, stop, parts, stop == info.n_rows)


def _step(info: TensorInfo, group: int, n_elements: int) -> int:
    return max(1, n_elements // info.n_cols // group) * group


def _device_pieces(
    targets: list[Target], workers: DeviceWorkers, numbers: Iterator[int]
) -> Iterator[Piece]:
    info = targets[0].planned.source
    matrix_rows = info.n_rows // info.n_matrices
    open_targets = [target for target in targets if not target.done]
    weights = [target.weights() for target in open_targets]
    for start, stop in workers.pieces(info, row_group(targets)):
        matrices = slice(start // matrix_rows, -(-stop // matrix_rows))
        parts = tuple(
            Part(target, None if w is None else w[matrices])
            for target, w in zip(open_targets, weights)
        )
        yield Piece(info, start, stop, parts, stop == info.n_rows, next(numbers))


def _part(target: Target, weights: np.ndarray | None, file: str) -> Part:
    return Part(target, weights, None if target.kept else _encoder(target.planned, weights, file))


def _encoder(
    tensor: PlannedTensor, importance: np.ndarray | None, file: str
) -> Callable[[np.ndarray], np.ndarray]:
    target, n_cols = tensor.target.type, tensor.source.n_cols
    plain = ggml_type(target.base) if target.base else target
    if plain.is_float:
        return lambda x: arrange_rows(target, encode_float(plain, x), n_cols)
    try:
        run = (
            symmetric_encoder(n_cols)
            if tensor.symmetric
            else row_encoder(target, n_cols, importance)
        )
    except IqforgeError as error:
        raise type(error)(error.message, file=file, tensor=tensor.source.name) from None

    def encode(x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), plain.row_bytes(n_cols)), dtype=np.uint8)
        run(x, out)
        return arrange_rows(target, out, n_cols)

    return encode


# (bytes, sums) of a part; sums: float64[6] = sum e^2, sum x^2, sum w e^2, sum w x^2, max |e|,
# values zeroed; None if nothing was measured
Result = tuple[np.ndarray, np.ndarray | None]


def work(
    source: Source, piece: Piece, measure: bool = True, reading: Future | None = None
) -> list[Result]:
    """A result for every part of a piece, whose rows may be on their way already. Nothing is
    measured of bytes that are kept, nor, as a rule, without `measure`.
    """
    info = piece.source
    rows = source.read_rows(info, piece.start, piece.stop) if reading is None else reading.result()
    kept = (
        _kept_bytes(source, piece, rows) if any(part.target.kept for part in piece.parts) else None
    )
    if piece.kept:
        return [(kept, None)] * len(piece.parts)
    x = decode(info.type, rows, info.n_cols)
    del rows
    changed = [part.planned for part in piece.parts if not part.target.kept]
    zeroed = zero_non_finite(x) if any(planned.nan_to_zero for planned in changed) else 0
    fits = 0.0 if measure or zeroed else _largest(x)
    checked = False
    results: list[Result] = []
    for part in piece.parts:
        target = part.planned.target.type
        if part.target.kept:
            results.append((kept, None))
            continue
        if (
            not measure
            and not zeroed
            and fits <= _SURELY_FITS.get(target.name, _SURELY_FITS_QUANTIZED)
        ):
            results.append((part.encode(x), None))
            continue
        if not target.is_float and not checked:
            refuse_non_finite(
                x, info.name, source.path, first_row=piece.start % (info.n_rows // info.n_matrices)
            )
            checked = True
        results.append(_measured(part, x, zeroed, source.path))
    return results


def _largest(x: np.ndarray) -> float:
    """The largest magnitude; NaN, which fails every comparison, if there is one."""
    return float(max(x.max(), -x.min())) if x.size else float("nan")


def _kept_bytes(source: Source, piece: Piece, rows: np.ndarray) -> np.ndarray:
    info = piece.source
    if info.type.tail_bytes and piece.stop == info.n_rows:
        return np.concatenate(
            [
                rows.reshape(-1),
                source.read_bytes(info, info.n_bytes - info.type.tail_bytes, info.n_bytes),
            ]
        )
    return np.array(rows)


def _measured(part: Part, x: np.ndarray, zeroed: int, file: str) -> Result:
    info, target = part.planned.source, part.planned.target.type
    data = part.encode(x)
    sums = error_sums(x, decode(target, data, info.n_cols, as_weights=True), part.weights)
    if not np.isfinite(sums[4]) and np.isfinite(x).all():
        raise NonFiniteError(
            f"values up to {np.abs(x).max():g} do not fit into {target}",
            tensor=info.name,
            file=file,
        )
    return data, np.array([*sums, zeroed])


def error_sums(x: np.ndarray, made: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """float64[5]: sum e^2, sum x^2, sum w e^2, sum w x^2, max |e| of e = x - made, which becomes
    `made`; both float32[rows, n_cols].
    """
    with np.errstate(
        invalid="ignore"
    ):  # a tensor that becomes floats keeps what is not finite, and its errors are NaN
        error = np.subtract(x, made, out=made)
    largest = float(np.abs(error).max(initial=0))
    e2, x2 = _column_squares(error), _column_squares(x)
    w = np.ones(x.shape[1]) if weights is None else weights.astype(np.float64)
    return np.array([e2.sum(), x2.sum(), (w * e2).sum(), (w * x2).sum(), largest])


def _column_squares(x: np.ndarray) -> np.ndarray:
    """float64[n_cols]: sums of squares. Summed in float32, which loses nothing that matters here,
    unless that overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.einsum("ij,ij->j", x, x)
        return (
            sums.astype(np.float64)
            if np.isfinite(sums).all()
            else np.einsum("ij,ij->j", x, x, dtype=np.float64)
        )
