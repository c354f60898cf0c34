"""What later layers read of the stream that matrices of a model add to, and how much it weighs.

What a matrix adds to the stream of a model is read by the matrices after it, some directions of it
far more than others. Routers are an extreme: an error that changes the choice of experts costs far
more than its size says, and in models of experts more than half of the KL divergence at five bits
comes from choices that change. So the rows of such a matrix are rounded together (`row_metric.py`),
with the metric

    G = I + n (ROUTERS R / tr(R) + READERS A / tr(A)),    n rows

R is the sum of (W N)^T (W N) over the later routers with weights W, centered over the experts, as
what is added to all logits changes no choice, and the weights N of the norm before it. A is the sum
of the same products of the matrices that read later inputs of attention and of feed-forward layers,
those of each input divided by their trace. A takes width times the number of weights operations,
so it is left out for large models.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ...formats.codecs.codec import decode
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import ROUTER, TensorName
from .kernels.feedback import compensate
from .row_metric import RowMetric, row_metric

ROUTERS, READERS = 0.5, 1.0  # relative to the identity
_MOST_ELEMENTS = 1 << 26  # of a matrix, as all its rows are held at once
_MOST_PRODUCTS = 1 << 41  # that A takes
_THREADED = 1 << 24  # products from which threads share the work
_CHUNK = 256  # rows of a reader that are added up together
_HELD = 4  # metrics, which threads use for tensors that are next to each other
_APART = 8  # routers from one kept sum of theirs to the next one
# What adds to the stream after a layer's attention, and after its feed-forward layer.
_AFTER_ATTENTION = ("attn_output", "ssm_out", "shortconv.out_proj")
_AFTER_FFN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_NORMS = ("ffn_norm.weight", "post_attention_norm.weight")  # before the latter, by architecture
_NORM_OF_OUTPUT = "post_ffw_norm.weight"
# What reads the input of a layer's attention, and of its feed-forward layer.
_ATTENTION = (
    *("attn_qkv", "attn_gate", "attn_q", "attn_k", "attn_v"),
    *("attn_q_a", "attn_kv_a_mqa", "ssm_in", "shortconv.in_proj"),
)
_FFN = (
    *("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"),
    *("ffn_gate_shexp", "ffn_up_shexp"),
)


@dataclass(frozen=True)
class _Input:
    """An input of a layer: the norm before it, its router, and the other matrices that read it."""

    norm: TensorInfo
    router: TensorInfo | None
    readers: tuple[TensorInfo, ...]


class RowMetrics:
    """The metrics of rows of a source's matrices. Threads may share it.

    In memory are the last metrics, the sums of readers from every input on, and those of routers
    from some inputs on, from which the others are added up again.
    """

    def __init__(self, source: Source):
        self._source = source
        self._tensors = {one.name: one for one in source.tensors}
        self._lock = threading.Lock()
        self._made: dict[tuple[int, int], RowMetric] = {}  # the one that was used last at the end
        self._routers: dict[tuple[int, int], np.ndarray] = {}
        self._readers: dict[tuple[int, int], np.ndarray] = {}
        names = [TensorName.parse(one.name) for one in source.tensors]
        layers = {name.layer for name in names if name.layer is not None}
        layers -= {name.layer for name in names if name.is_mtp}  # these read a stream of their own
        # Inputs by position: those of attention and feed-forward layers in turn.
        found = {
            2 * layer + ffn: self._input(layer, bool(ffn))
            for layer in sorted(layers)
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
        width = info.shape[-2]
        key = positions[0], width
        with self._lock:
            found = self._made.pop(key, None)
            if found is None:
                routers = self._sum_of_routers(positions, width)
                readers = self._sum_of_readers(positions, width)
                found = row_metric(_joined(routers, readers), info.name)
            self._made[key] = found
            if len(self._made) > _HELD:
                del self._made[next(iter(self._made))]
            return found

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
        if not ffn and not any(f"blk.{layer}.{norm}" in self._tensors for norm in _NORMS):
            names += _FFN  # both are side by side
        readers = [one for name in names if (one := reads(f"{name}.weight")) is not None]
        return _Input(found[0], reads(ROUTER) if ffn else None, tuple(readers))

    def _sum_of_routers(self, positions: list[int], width: int) -> np.ndarray:
        """Return R of the inputs at these positions, float32[width, width]."""
        total, start = np.zeros((width, width), dtype=np.float32), 0
        found = [
            (position, one.router, one.norm)
            for position in reversed(positions)
            if (one := self._inputs[position]).router is not None
        ]
        kept = range(_APART - 1, len(found), _APART)
        for number in kept:
            if (before := self._routers.get((found[number][0], width))) is not None:
                total, start = before.copy(), number + 1
        for number, (position, router, norm) in enumerate(found[start:], start):
            read = self._read(router, 0, router.n_rows) * self._weights(norm)
            _add_square(total, read - read.mean(axis=0))
            if number in kept:
                self._routers[position, width] = total.copy()
        return total

    def _sum_of_readers(self, positions: list[int], width: int) -> np.ndarray:
        """Return A of the inputs at these positions, float32[width, width]."""
        total = np.zeros((width, width), dtype=np.float32)
        for position in reversed(positions):
            key, one = (position, width), self._inputs[position]
            if one.readers and key not in self._readers:
                self._readers[key] = total + self._share_of_readers(one)
            total = self._readers.get(key, total)
        return total

    def _share_of_readers(self, one: _Input) -> np.ndarray:
        """Return what the readers of an input add to A, float32[width, width]."""
        norm, width = self._weights(one.norm), one.norm.n_elements
        made = np.zeros((width, width), dtype=np.float32)
        for info in one.readers:
            step = _CHUNK * info.type.group_rows
            for start in range(0, info.n_rows, step):
                stop = min(start + step, info.n_rows)
                _add_square(made, self._read(info, start, stop) * norm)
        trace = np.float32(np.trace(made, dtype=np.float64))
        return made / trace if 0 < trace < np.inf else np.zeros_like(made)

    def _weights(self, norm: TensorInfo) -> np.ndarray:
        return self._read(norm, 0, norm.n_rows).reshape(-1)

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
        compensate(columns[first:last], padded, total[first:last], rows)

    if n * n * rows < _THREADED:
        add(0, n)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="rows") as pool:
        list(pool.map(add, cuts[:-1], cuts[1:]))


def _joined(routers: np.ndarray, readers: np.ndarray) -> np.ndarray:
    """Return G float64[n, n] of R and A, float32[n, n]. A sum that is not finite is left out: the
    run says which weights are not.
    """
    n = len(routers)
    g = np.eye(n)
    for share, summed in ((ROUTERS, routers), (READERS, readers)):
        trace = float(np.trace(summed, dtype=np.float64))
        if 0 < trace < np.inf:
            g += share * n / trace * summed.astype(np.float64)
    return g
