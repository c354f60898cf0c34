"""The common part of checkpoints and adapters as a `Source`: rows of their output tensors by name,
and their files.
"""

from __future__ import annotations

import numpy as np

from ..errors import IqforgeError, ShapeError
from ..formats.source import Source, TensorInfo
from .architectures.weight import ConvertedTensor
from .checkpoint.folder import Checkpoint
from .tensors.stored import TensorRows


class RowsSource(Source):
    """The reading half of a `Source`; a subclass adds `metadata`. `mapped` are the output tensors
    with their rows.
    """

    def __init__(self, checkpoint: Checkpoint, mapped: list[ConvertedTensor]):
        self.checkpoint = checkpoint
        self.path = str(checkpoint.path)
        self.parallel_reads = checkpoint.parallel_reads
        self.tensors: tuple[TensorInfo, ...] = tuple(tensor.info for tensor in mapped)
        self._rows: dict[str, TensorRows] = {tensor.info.name: tensor.rows for tensor in mapped}

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Return uint8[stop - start, row_bytes] of the stored type. Only the stored rows that are
        needed are read. Raise ShapeError for rows that the tensor does not have.
        """
        rows = self._of(tensor)
        if not 0 <= start <= stop <= rows.n_rows:
            raise ShapeError(
                f"rows {start} to {stop} of {rows.n_rows} were asked for",
                file=self.path,
                tensor=tensor.name,
            )
        return rows.read(start, stop)

    def release(self, tensor: TensorInfo) -> None:
        self._of(tensor).release()

    def _of(self, tensor: TensorInfo) -> TensorRows:
        if tensor.name not in self._rows:
            raise IqforgeError("no such tensor", file=self.path, tensor=tensor.name)
        return self._rows[tensor.name]

    @property
    def files(self) -> tuple[str, ...]:
        """Everything in the checkpoint's folder except GGUF files, which are results."""
        return tuple(
            str(file) for file in sorted(self.checkpoint.path.iterdir()) if file.suffix != ".gguf"
        )

    def close(self) -> None:
        self.checkpoint.close()
