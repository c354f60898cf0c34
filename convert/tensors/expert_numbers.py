"""Tables of the experts of tokens."""

from __future__ import annotations

import numpy as np

from ...errors import CheckpointError
from .stored import WIDENED_DTYPES, StoredTensor, TensorReader


class ExpertNumbers:
    """The table of experts of every token, as rows of I32. Reading raises CheckpointError for the
    number of an expert that the model does not have.
    """

    def __init__(self, reader: TensorReader, tensor: StoredTensor, n_experts: int):
        if tensor.dtype not in ("I32", "I64"):
            raise CheckpointError(
                f"has dtype {tensor.dtype}, expected I32 or I64",
                file=tensor.file,
                tensor=tensor.name,
            )
        self.n_rows, n_cols = tensor.shape
        self.row_bytes = 4 * n_cols
        self._reader, self._tensor, self._n_experts = reader, tensor, n_experts

    def read(self, start: int, stop: int) -> np.ndarray:
        tensor = self._tensor
        stored = tensor.n_bytes // self.n_rows
        data = self._reader.read(tensor, start * stored, stop * stored)
        numbers = data.view(WIDENED_DTYPES[tensor.dtype])
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self._n_experts:
            wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
            raise CheckpointError(
                f"has expert {wrong}, but config.json has {self._n_experts} experts",
                file=tensor.file,
                tensor=tensor.name,
            )
        return numbers.astype("<i4").view(np.uint8).reshape(stop - start, self.row_bytes)

    def release(self) -> None:
        self._reader.release(self._tensor)
