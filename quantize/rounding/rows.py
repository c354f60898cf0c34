"""Keep errors out of what later matrices read, by rounding rows to make up for each other.

What a matrix adds to the stream of a model is read by the matrices after it, some directions of it
far more than others. Routers are an extreme: an error that changes the choice of experts costs far
more than its size says, and in models of experts more than half of the KL divergence at five bits
comes from choices that change. The error E of such a matrix is therefore weighed by tr(G E H E^T),
with the second moments H of its inputs and

    G = I + n (ROUTERS R / tr(R) + READERS A / tr(A)),    n rows

R is the sum of (W N)^T (W N) over the later routers with weights W, centered over the experts, as
what is added to all logits changes no choice, and the weights N of the norm before it. A is the sum
of the same products of the matrices that read later inputs of attention and of feed-forward layers,
those of each input divided by their trace. A takes width times the number of weights operations,
so it is left out for large models.

With G = L L^T, L upper, rows are rounded in blocks K, one after the other, to W_K plus what the
errors of the blocks J before it leave:

    W_K + L_KK^-T L_JK^T E_J

Within a block rows are rounded on their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ...formats.codecs.codec import decode, decode_plain
from ...formats.kernel import CompiledLoop
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import ROUTER, TensorName
from ...formats.types import GGMLType
from . import kernels
from .cholesky import lower_factor
from .methods import RowRounder

ROUTERS, READERS = 0.5, 1.0  # relative to the identity
_LEAST_BLOCK = 16  # rows of the last blocks: what follows a block can make up for it
_MOST_ELEMENTS = 1 << 26  # of a matrix, as all its rows are held at once
_MOST_PRODUCTS = 1 << 41  # that A takes
_THREADED = 1 << 24  # products from which threads share the work
_CHUNK = 256  # rows of a reader that are added up together
# What adds to the stream after a layer's attention, and after its feed-forward layer.
_AFTER_ATTENTION = ("attn_output", "ssm_out", "shortconv.out_proj")
_AFTER_FFN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_NORMS = ("ffn_norm.weight", "post_attention_norm.weight")  # before the latter, by architecture
_NORM_OF_OUTPUT = "post_ffw_norm.weight"
# What reads the input of a layer's attention, and of its feed-forward layer.
_ATTENTION = (
    *("attn_qkv", "attn_gate", "attn_q", "attn_k", "attn_v"),
    *("attn_q_a", "attn_kv_a_mqa", "ssm_in"),
)
_FFN = (
    *("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"),
    *("ffn_gate_shexp", "ffn_up_shexp"),
)


@dataclass(frozen=True)
class RowMetric:
    """How rows are rounded together: the rows at which blocks end, and what errors of earlier rows
    add to later ones, float32[rows, rows].
    """

    ends: tuple[int, ...]
    feedback: np.ndarray


class CoupledRounder:
    """Round all rows of a matrix by a metric of rows: called with x float32[rows, n_cols] and out
    uint8[rows, row_bytes]. rounder: rounds rows on their own.
    """

    def __init__(self, type: GGMLType, n_cols: int, rounder: RowRounder, metric: RowMetric):
        self.type, self.n_cols, self.rounder, self.metric = type, n_cols, rounder, metric

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        errors = np.zeros((self.n_cols, len(x)), dtype=np.float32)
        start = 0
        for end in self.metric.ends:
            rows = slice(start, end)
            target = np.ascontiguousarray(x[rows], dtype=np.float32)
            if start:
                added = np.zeros((self.n_cols, end - start), dtype=np.float32)
                kernels.compensate(errors, self.metric.feedback, added, start)
                target = target + added.T
            made = np.empty((end - start, out.shape[1]), dtype=np.uint8)
            self.rounder(target, made)
            out[rows] = made
            errors[:, rows] = (x[rows] - decode_plain(self.type, made, self.n_cols)).T
            start = end


@dataclass(frozen=True)
class _Input:
    """An input of a layer: the norm before it, its router, and the other matrices that read it."""

    norm: TensorInfo
    router: TensorInfo | None
    readers: tuple[TensorInfo, ...]


class RowMetrics:
    """The metrics of rows of a source's matrices. Threads may share it."""

    def __init__(self, source: Source):
        self._source = source
        self._tensors = {one.name: one for one in source.tensors}
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], RowMetric] = {}
        self._sums: dict[tuple[int, int], list[np.ndarray]] = {}
        # Inputs by position: those of attention and feed-forward layers in turn.
        layers = {TensorName.parse(one.name).layer for one in source.tensors} - {None}
        found = {
            2 * layer + ffn: self._input(layer, bool(ffn))
            for layer in sorted(layer for layer in layers if layer is not None)
            for ffn in (0, 1)
        }
        self._inputs = {position: one for position, one in found.items() if one is not None}
        products = sum(
            info.n_elements * info.n_cols for one in self._inputs.values() for info in one.readers
        )
        if products > _MOST_PRODUCTS:
            self._inputs = {
                position: replace(one, readers=()) for position, one in self._inputs.items()
            }

    def couples(self, info: TensorInfo) -> bool:
        """Return whether the rows of a tensor are rounded together."""
        return bool(self._positions(info))

    def of(self, info: TensorInfo) -> RowMetric | None:
        """Return the metric of the rows of each matrix of a tensor, None if they are rounded on
        their own. Reads routers and readers.
        """
        positions = self._positions(info)
        if not positions:
            return None
        with self._lock:
            key = positions[0], info.shape[-2]
            if key not in self._made:
                self._made[key] = _metric(*self._summed(positions, info.shape[-2]))
            return self._made[key]

    def _positions(self, info: TensorInfo) -> list[int]:
        """Return the positions of the inputs that what the tensor adds to the stream reaches."""
        name = TensorName.parse(info.name)
        if name.layer is None or len(info.shape) < 2 or name.suffix != "weight":
            return []
        if info.shape[-2] * info.n_cols > _MOST_ELEMENTS or self._is_normed(name):
            return []
        if name.role in _AFTER_FFN:
            first = 2 * name.layer + 2
        elif name.stem in _AFTER_ATTENTION:
            first = 2 * name.layer + 1
        else:
            return []
        return [
            position
            for position, one in self._inputs.items()
            if position >= first
            and one.norm.n_elements == info.shape[-2]
            and (one.router is not None or one.readers)
        ]

    def _is_normed(self, name: TensorName) -> bool:
        """Return whether a norm follows the matrix, so that its errors are scaled."""
        norms = [f"{name.prefix}.{norm}" in self._tensors for norm in _NORMS]
        return all(norms) or f"{name.prefix}.{_NORM_OF_OUTPUT}" in self._tensors

    def _input(self, layer: int, ffn: bool) -> _Input | None:
        found = [
            self._tensors[name]
            for norm in (_NORMS if ffn else ("attn_norm.weight",))
            if (name := f"blk.{layer}.{norm}") in self._tensors
        ]
        if not found:
            return None
        width = found[0].n_elements

        def reads(name: str) -> TensorInfo | None:
            info = self._tensors.get(f"blk.{layer}.{name}")
            return info if info is not None and info.n_cols == width else None

        names = _FFN if ffn else _ATTENTION
        readers = [one for name in names if (one := reads(f"{name}.weight")) is not None]
        return _Input(found[0], reads(ROUTER) if ffn else None, tuple(readers))

    def _summed(self, positions: list[int], width: int) -> list[np.ndarray]:
        """Return [R, A] of the inputs at these positions, float32[width, width] each."""
        total = [np.zeros((width, width), dtype=np.float32) for _ in range(2)]
        for position in reversed(positions):
            key = position, width
            if key not in self._sums:
                one = self._inputs[position]
                norm = self._read(one.norm, 0, one.norm.n_rows).reshape(-1)
                made = [total[0].copy(), np.zeros((width, width), dtype=np.float32)]
                if one.router is not None:
                    read = self._read(one.router, 0, one.router.n_rows) * norm
                    _add_square(made[0], read - read.mean(axis=0))
                for info in one.readers:
                    step = _CHUNK * info.type.group_rows
                    for start in range(0, info.n_rows, step):
                        stop = min(start + step, info.n_rows)
                        _add_square(made[1], self._read(info, start, stop) * norm)
                trace = np.float32(np.trace(made[1], dtype=np.float64))
                made[1] = total[1] + made[1] / trace if 0 < trace < np.inf else total[1]
                self._sums[key] = made
            total = self._sums[key]
        return total

    def _read(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return float64[rows, n_cols]."""
        data = np.array(self._source.read_rows(info, start, stop))
        return decode(info.type, data, info.n_cols).astype(np.float64)


def _add_square(total: np.ndarray, read: np.ndarray) -> None:
    """Add read^T read of float64[rows, n] to float32[n, n], in index order, by threads."""
    rows, n = read.shape
    read = read.astype(np.float32)
    columns = np.ascontiguousarray(read.T)
    padded = np.concatenate([np.zeros((rows, rows), dtype=np.float32), read], axis=1)
    workers = min(16, os.cpu_count() or 1)
    cuts = [n * i // workers for i in range(workers + 1)]

    def add(first: int, last: int) -> None:
        kernels.compensate(columns[first:last], padded, total[first:last], rows)

    if n * n * rows < _THREADED:
        add(0, n)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="rows") as pool:
        list(pool.map(add, cuts[:-1], cuts[1:]))


def _metric(routers: np.ndarray, readers: np.ndarray) -> RowMetric:
    rows = len(routers)
    g = np.eye(rows)
    for share, summed in ((ROUTERS, routers), (READERS, readers)):
        trace = float(np.trace(summed, dtype=np.float64))
        if 0 < trace < np.inf:
            g += share * rows / trace * summed.astype(np.float64)
    ends = tuple(_ends(rows))
    # The upper factor of G is the lower factor of G with both axes reversed.
    lower = np.ascontiguousarray(g[::-1, ::-1])
    feedback = np.zeros((rows, rows), dtype=np.float32)
    if not np.isfinite(g).all() or not lower_factor(lower):
        return RowMetric(ends, feedback)  # weights that are not finite are reported where they are
    factor = np.ascontiguousarray(np.triu(lower[::-1, ::-1]))
    start = 0
    for end in ends:
        if start:
            spread = factor[:start, start:end].copy()
            solve_upper(spread, factor[start:end, start:end].copy())
            feedback[:start, start:end] = spread
        start = end
    return RowMetric(ends, feedback)


def _ends(rows: int) -> Iterator[int]:
    """Yield where blocks end: two of a quarter of the rows, two of an eighth, and so on."""
    size, end = rows // 4, 0
    while end < rows:
        for _ in range(2):
            end = min(rows, end + max(_LEAST_BLOCK, size))
            yield end
            if end == rows:
                return
        size //= 2


def _solve_upper(x, r):
    """Replace x float64[rows, n] by X with X R = x, for R float64[n, n], upper."""
    n = r.shape[0]
    for row in range(len(x)):
        for k in range(n):
            value = x[row, k] / r[k, k]
            x[row, k] = value
            for i in range(k + 1, n):
                x[row, i] -= value * r[k, i]


solve_upper = CompiledLoop(_solve_upper)
