"""Matrices outside of layers that are stored one by one with numbers, and become one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ..tensors.rows import ConcatenatedRows, StoredRows
from ..tensors.stored import StoredTensor
from .base import Architecture
from .weight import ConvertedTensor, Weight, check_shape, split_numbers


class NumberedMatrices(Architecture):
    """An architecture with such matrices. Subclasses set `numbered`: for each stored name, with
    `{}` for the number, the GGUF name of all and the shape of one; and `n_numbered`, how many there
    are of each.
    """

    numbered: dict[str, tuple[str, tuple[int, int]]]
    n_numbered: int

    def tensors(self) -> list[ConvertedTensor]:
        self._found: dict[str, dict[int, StoredTensor]] = {name: {} for name in self.numbered}
        made = super().tensors()
        for stored, found in self._found.items():
            for number in range(self.n_numbered):
                if number not in found:
                    raise CheckpointError(
                        "is missing from the checkpoint",
                        file=self.checkpoint.path,
                        tensor=stored.format(number),
                    )
        return made

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern not in self.numbered:
            yield from super().convert(name, tensor, table)
            return
        (gguf, shape), found = self.numbered[pattern], self._found[pattern]
        if numbers[0] >= self.n_numbered:
            raise CheckpointError(
                f"is number {numbers[0]}, but config.json implies {self.n_numbered} of them",
                file=tensor.file,
                tensor=tensor.name,
            )
        check_shape(tensor, shape)
        found[numbers[0]] = tensor
        if len(found) < self.n_numbered:
            return
        stored = tuple(found[number] for number in range(self.n_numbered))
        for other in stored[1:]:
            if other.dtype != stored[0].dtype:
                raise CheckpointError(
                    f"has dtype {other.dtype}, but {stored[0].name}, with which it is stacked, has"
                    f" {stored[0].dtype}",
                    file=other.file,
                    tensor=other.name,
                )
        rows = ConcatenatedRows([StoredRows(self.checkpoint, one) for one in stored])
        info = TensorInfo(gguf, (len(stored), *shape), self.checkpoint.type_of(stored[0]))
        yield ConvertedTensor(info, rows, stored)
