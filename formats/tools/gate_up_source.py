"""Merge or split gate and up of stacked experts while they are read; see `gate_up.py`."""

from __future__ import annotations

import numpy as np

from ..source import Source, TensorInfo, WrappedSource
from .gate_up import PlannedMerge, plan_gate_up


class GateUpSource(WrappedSource):
    """`inner` with `ffn_gate_up_exps` instead of its halves, or with `undo` the other way round.
    Raise the errors of `plan_gate_up`.
    """

    def __init__(self, inner: Source, undo: bool = False):
        super().__init__(inner)
        self._plan = {planned.target.name: planned for planned in plan_gate_up(inner, undo)}
        self.tensors = tuple(planned.target for planned in self._plan.values())

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        """Return the tensor of `inner` whose place this one takes."""
        return self._plan[tensor.name].spans[-1].tensor

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes]; a copy where rows come from both halves."""
        planned = self._plan[tensor.name]
        if not planned.changed:
            return self.inner.read_rows(self.stored(tensor), start, stop)
        parts = (
            self._columns(planned, start, stop)
            if len(planned.target.shape) == 2
            else self._rows(planned, start, stop)
        )
        return (
            np.ascontiguousarray(parts[0])
            if len(parts) == 1
            else np.concatenate(parts, axis=int(len(planned.target.shape) == 2))
        )

    def _columns(self, planned: PlannedMerge, start: int, stop: int) -> list[np.ndarray]:
        """Return the columns of biases, which have a row per expert: each span is a part of its
        rows.
        """
        return [
            self.inner.read_rows(span.tensor, start, stop)[:, span.start : span.start + span.size]
            for span in planned.spans
        ]

    def _rows(self, planned: PlannedMerge, start: int, stop: int) -> list[np.ndarray]:
        parts, row_bytes = [], planned.target.row_bytes
        unit_rows = planned.target.n_rows // planned.n_units
        for unit in range(start // unit_rows, -(-stop // unit_rows)):
            first = unit * unit_rows  # of the span, in the target
            for span in planned.spans:
                rows = span.size // row_bytes
                low, high = max(start, first), min(stop, first + rows)
                if low < high:
                    at = (
                        unit * (span.tensor.n_rows // planned.n_units)
                        + span.start // row_bytes
                        - first
                    )
                    parts.append(self.inner.read_rows(span.tensor, low + at, high + at))
                first += rows
        return parts

    def read_bytes(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return bytes of a tensor. Types with bytes after the last row are never merged."""
        if self._plan[tensor.name].changed:
            return Source.read_bytes(self, tensor, start, stop)
        return super().read_bytes(tensor, start, stop)

    def period(self, tensor: TensorInfo) -> int:
        return tensor.n_rows if self._plan[tensor.name].changed else super().period(tensor)

    def release(self, tensor: TensorInfo) -> None:
        for span in self._plan[tensor.name].spans:
            self.inner.release(span.tensor)
