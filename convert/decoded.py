"""Tensors that a checkpoint stores in a packed form, seen as what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats.types import GGMLType
from .safetensors import StoredTensor

if TYPE_CHECKING:
    from .rows import Rows


@dataclass(frozen=True, kw_only=True)
class DecodedTensor(StoredTensor):
    """`rows` yields the tensor as `type`; `shape` is the logical one, file and positions are those of the packed codes."""

    type: GGMLType
    rows: Rows

    @property
    def n_bytes(self) -> int:
        return self.type.tensor_bytes(self.shape)


def decoded(packed: StoredTensor, name: str, shape: tuple[int, ...], type: GGMLType, rows: Rows) -> DecodedTensor:
    return DecodedTensor(name, type.name, shape, packed.file, packed.begin, packed.end, type=type, rows=rows)
