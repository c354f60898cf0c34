"""The plan of a step: operations in order, and what they read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np

from ...formats.types import GGMLType
from ..layers.rope import Rope
from ..simd import dots
from ..simd.operations import operation, packed
from ..simd.products import Rows, Vectors
from ..simd.step import heads
from ..simd.threads import Program
from ..state.cache import CacheSettings
from ..weights.encoded import Matrix, Stacked
from ..weights.linear import Linear
from ..weights.ranges import RangeName
from ..weights.stacked_linear import ExpertLinear, HeadLinear
from .memory import Buffer, Memory

LANES = 16  # vectors have multiples of so many elements
UNIT = 32  # and those that are multiplied with blocks of so many


class NotPlanned(Exception):
    """A step cannot be planned: says why."""


class Plan:
    """Operations of a step of a network, for sequences of `context` tokens with a cache of these
    settings.

    frame: int64, see `simd.step.heads`. place: the number of what a sequence keeps for the layer
    that is planned now. rounds: whether products with quantized weights are in 8 bits.
    """

    def __init__(self, n_threads: int, settings: CacheSettings, context: int, *, rounds: bool):
        self.memory, self.settings, self.context = Memory(n_threads), settings, context
        self.rounds, self.rounded_types = rounds, set[GGMLType]()
        # Types that are multiplied, whether in 8 bits, a matrix, and whether it is an expert's.
        self.multiplied: list[tuple[GGMLType, bool, Matrix, bool]] = []
        self.frame = np.zeros(8, dtype=np.int64)
        self.place = 0
        self.names: list[str] = []  # of matrices, in order
        self._operations: list[tuple[int, np.ndarray]] = []
        self._meets: list[bool] = []
        self._ranges: list[RangeName] = []
        self._range = RangeName("", "step")
        self._first = self.memory.array(np.zeros(1, dtype=np.int64))  # the number of one matrix
        self._angles: dict[int, tuple[Buffer, Any, np.ndarray]] = {}
        # Vectors that were rounded since the last operation that is no product.
        self._rounded: dict[tuple[Vectors, int, int], Vectors] = {}

    @property
    def frame_address(self) -> int:
        """The address of the frame in memory."""
        return self.frame.ctypes.data

    @property
    def layer_offset(self) -> int:
        """Where in what belongs to a sequence this layer has its places, in bytes."""
        return 24 * self.place

    def program(self) -> Program:
        """The compiled operations, in order."""
        return Program(self._operations, self._meets)

    def ranges(self) -> list[tuple[RangeName, Program]]:
        """Return the program in pieces, each with the range that it belongs to."""
        operations = iter(self._operations)
        return [
            (name, Program([next(operations) for _ in same]))
            for name, same in groupby(self._ranges)
        ]

    @contextmanager
    def within(self, name: RangeName) -> Iterator[None]:
        """Let operations that are added belong to this range."""
        before, self._range = self._range, name
        yield
        self._range = before

    def _append(self, code: int, arguments: np.ndarray, meet: bool) -> None:
        self._rounded.clear()
        self._append_product(code, arguments, meet)

    def _append_product(self, code: int, arguments: np.ndarray, meet: bool) -> None:
        """Append an operation that changes no vector that was rounded for products."""
        self._operations.append((code, arguments))
        self._meets.append(meet)
        self._ranges.append(self._range)

    def add(self, code: int, *arguments: int | float, meet: bool = True) -> np.ndarray:
        """Add an operation, and return its arguments. meet: whether later ones need what other
        threads wrote in this one, or in one before.
        """
        found = packed(*arguments)
        self._append(code, found, meet)
        return found

    def meet(self) -> None:
        """Let the threads meet after the last operation."""
        self._meets[-1] = True

    def decoding(self, rows: Rows, out: Buffer) -> np.ndarray:
        """Add the decoding of one row; return the arguments, of which the first is its address."""
        code, arguments = rows.part(0, 1).decoding(out.address)
        self._append(code, arguments, False)
        return arguments

    # Products. Threads do not meet after them: `meet` once all that are independent are added.

    def product(self, linear: Linear, x: Buffer, y: Buffer | str) -> Buffer:
        """Add y = scale * W x + b. y: where, or the name of a buffer."""
        if isinstance(y, str):
            y = self.memory.floats(y, linear.rows)
        self.names.append(linear.name)
        scale = linear.scale
        scales = 0 if scale is None else self.memory.vector(scale.reshape(-1))
        if scale is not None and scale.numel() != 1:
            raise NotPlanned(f"{linear.name} has a scale for every row")
        first = 0
        for matrix in _parts(linear.matrix):
            bias = linear.bias
            if bias is not None:
                bias = bias[first : first + matrix.rows]
            rows = _kept(matrix, linear.name)
            self._note(rows, matrix, False)
            with self.within(linear.range):
                self._multiply(
                    rows,
                    matrix.rows,
                    Vectors(x.address, 0, x.thread_step),
                    Vectors(y.at(first).address),
                    Vectors(self._first),
                    1,
                    self.memory.vector(bias),
                    scales,
                )
            first += matrix.rows
        return y

    def products(
        self,
        linear: ExpertLinear | HeadLinear,
        x: Buffer,
        x_step: int,
        y: Buffer,
        y_step: int,
        chosen: Buffer,
        n: int,
    ) -> None:
        """Add products with n of several matrices, whose numbers are int64 at `chosen`. Steps are
        elements from one vector to the next.
        """
        stacks = [_parts(matrix) for matrix in linear.matrices]
        first = 0
        scales = self.memory.vector(linear.scale)
        for column in zip(*stacks, strict=True):
            rows, n_rows = _one_tensor(column, linear.name), column[0].rows
            self._note(rows, column[0], isinstance(linear, ExpertLinear))
            bias = linear.bias  # of all merged matrices
            biases = self.memory.vector(None if bias is None else bias[:, first : first + n_rows])
            with self.within(linear.range):
                self.multiply_each(
                    rows, n_rows, x, x_step, y.at(first), y_step, chosen, n, biases, scales
                )
            first += n_rows

    def multiply_each(
        self,
        rows: Rows,
        n_rows: int,
        x: Buffer,
        x_step: int,
        y: Buffer,
        y_step: int,
        chosen: Buffer,
        n: int,
        biases: int = 0,
        scales: int = 0,
    ) -> None:
        """Add what `products` adds, for matrices of `n_rows` of the rows each."""
        self._multiply(
            rows,
            n_rows,
            Vectors(x.address, 4 * x_step, x.thread_step),
            Vectors(y.address, 4 * y_step),
            Vectors(chosen.address, 0, chosen.thread_step),
            *(n, biases, scales),
        )

    def _multiply(
        self,
        rows: Rows,
        n_rows: int,
        x: Vectors,
        y: Vectors,
        chosen: Vectors,
        n: int = 1,
        biases: int = 0,
        scales: int = 0,
    ) -> None:
        if rows.n_cols % UNIT:
            raise NotPlanned(f"rows of {rows.n_cols} elements are no multiple of {UNIT}")
        if self._is_rounded(rows):
            self.rounded_types.add(rows.type)
            rounded = self._rounded_vectors(x, n, rows.n_cols)
            found = dots.multiplications(rows, n_rows, x, rounded, y, chosen, n, biases, scales)
        else:
            found = rows.multiplications(n_rows, x, y, chosen, n, biases, scales)
        self._append_product(*found, False)

    def _is_rounded(self, rows: Rows) -> bool:
        return self.rounds and dots.can_be_rounded(rows.type, rows.n_cols)

    def _note(self, rows: Rows, matrix: Matrix, is_expert: bool) -> None:
        self.multiplied.append((rows.type, self._is_rounded(rows), matrix, is_expert))

    def _rounded_vectors(self, x: Vectors, n: int, n_cols: int) -> Vectors:
        """Add the rounding of n vectors, unless it was added for an earlier product and they have
        not changed since. Every thread rounds them for itself.
        """
        n = n if x.step else 1
        key = (x, n, n_cols)
        if key not in self._rounded:
            size = dots.rounded_bytes(n_cols)
            name = f"rounded {len(self._rounded)} of {n} x {n_cols}"
            out = self.memory.own_floats(name, n * size // 4)
            self._rounded[key] = Vectors(out.address, size if x.step else 0, out.thread_step)
            self._append_product(*dots.rounding(x, n, n_cols, self._rounded[key]), False)
        return self._rounded[key]

    def angles(self, rope: Any) -> Buffer:
        """Return where the angles of a rotation are; they are computed at the start of a step."""
        if isinstance(rope, Rope):
            rope = rope.of_context(self.context)
        if id(rope) not in self._angles:
            if type(rope) is not Rope:
                raise NotPlanned("a rotation that is not known")
            rates = rope.rates.double().numpy().copy()
            out = self.memory.floats(f"angles {id(rope)}", 2 * len(rates))
            arguments = packed(
                *(self.frame_address, self.memory.array(rates), len(rates)),
                *(float(rope.magnitude), out.address),
            )
            self._operations.insert(0, (operation(heads.angles), arguments))
            self._meets.insert(0, False)
            self._ranges.insert(0, RangeName("", "rope"))
            self._angles[id(rope)] = out, rope, rates
        return self._angles[id(rope)][0]


def _parts(matrix: Any) -> Sequence[Matrix]:
    if isinstance(matrix, Stacked):
        return matrix.matrices
    if isinstance(matrix, Matrix):
        return [matrix]
    raise NotPlanned("a matrix on another device")


def _kept(matrix: Matrix, name: str) -> Rows:
    if (rows := matrix.kept()) is None:
        raise NotPlanned(f"{name} is not kept in memory")
    return rows


def _one_tensor(matrices: Sequence[Matrix], name: str) -> Rows:
    """Return the rows of all matrices, which follow each other."""
    first = matrices[0]
    if any(m.tensor is not first.tensor or m.index != i for i, m in enumerate(matrices)):
        raise NotPlanned(f"{name} is in several tensors")
    if (rows := first.kept_tensor()) is None:
        raise NotPlanned(f"{name} is not kept in memory")
    return rows
