"""Summarize a GGUF model without reading any tensor: keys, tensors with their places, sizes by
type.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import printable
from ..gguf.reader import open_gguf
from ..options import checks_keywords
from ..source import TensorInfo
from ..values import Value, ValueType

LIST_ITEMS, TEXT_LENGTH = 8, 400  # the length to which long arrays and texts are shortened


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor, the file that holds its data, and the byte at which they start there."""

    info: TensorInfo
    file: str
    offset: int

    @property
    def bits_per_weight(self) -> float:
        """Bits per element, including row headers."""
        return 8 * self.info.n_bytes / self.info.n_elements


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type together. `n_bytes` of data, without padding."""

    name: str
    n_tensors: int
    n_elements: int
    n_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight with row headers; 0 if there are no elements."""
        return 8 * self.n_bytes / max(1, self.n_elements)


@dataclass(frozen=True, repr=False)
class ModelSummary:
    """`files`: all shards; `file_bytes`: their sizes together. `types` begins with the type that
    takes most bytes.
    """

    files: tuple[str, ...]
    file_bytes: int
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: tuple[PlacedTensor, ...]
    types: tuple[TypeTotal, ...]

    def __repr__(self) -> str:
        """Say the number of tensors and weights, the size and the path, in a line."""
        total = self.total
        return (
            f"<ModelSummary {total.n_tensors} tensors, {total.n_elements:,} weights,"
            f" {self.file_bytes:,} bytes: {printable(self.files[0], 400)}>"
        )

    @property
    def total(self) -> TypeTotal:
        """The sums over all types, under the empty name."""
        return TypeTotal(
            "",
            len(self.tensors),
            sum(t.n_elements for t in self.types),
            sum(t.n_bytes for t in self.types),
        )

    def as_json(self, full: bool = False) -> dict[str, Any]:
        """Return plain objects that `json.dumps` takes. Shapes are in numpy order, the row length
        last.

        Long arrays and texts are shortened and get `length`, unless `full`; numbers that JSON does
        not have become texts ("nan", "inf").
        """
        total = self.total
        return {
            "files": list(self.files),
            "file_bytes": self.file_bytes,
            "version": self.version,
            "alignment": self.alignment,
            "metadata": {key: value_as_json(value, full) for key, value in self.metadata.items()},
            "tensors": [
                {
                    "name": t.info.name,
                    "shape": list(t.info.shape),
                    "type": t.info.type.name,
                    "n_elements": t.info.n_elements,
                    "n_bytes": t.info.n_bytes,
                    "bits_per_weight": round(t.bits_per_weight, 4),
                    "file": t.file,
                    "offset": t.offset,
                }
                for t in self.tensors
            ],
            "types": [
                {
                    "type": t.name,
                    "n_tensors": t.n_tensors,
                    "n_elements": t.n_elements,
                    "n_bytes": t.n_bytes,
                    "bits_per_weight": round(t.bits_per_weight, 4),
                }
                for t in self.types
            ],
            "n_tensors": total.n_tensors,
            "n_elements": total.n_elements,
            "n_bytes": total.n_bytes,
            "bits_per_weight": round(total.bits_per_weight, 4),
        }


@checks_keywords
def inspect_model(path: str | os.PathLike) -> ModelSummary:
    """Summarize a GGUF file, or a split model through its first shard. Raise the errors of
    `open_gguf`.
    """
    with open_gguf(path) as file:
        tensors = tuple(PlacedTensor(info, *file.location(info.name)) for info in file.tensors)
        size = sum(Path(shard).stat().st_size for shard in file.shards)
        return ModelSummary(
            file.shards,
            size,
            file.version,
            file.alignment,
            file.metadata,
            tensors,
            _totals(file.tensors),
        )


def _totals(tensors: tuple[TensorInfo, ...]) -> tuple[TypeTotal, ...]:
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type.name, []).append(tensor)
    totals = [
        TypeTotal(name, len(group), sum(t.n_elements for t in group), sum(t.n_bytes for t in group))
        for name, group in by_type.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.n_bytes, total.name)))


def value_as_json(value: Value, full: bool = False) -> dict[str, Any]:
    """Return `{"type", "value"}` of a metadata value; arrays also have `element`, shortened values
    `length`.
    """
    kind: dict[str, Any] = {"type": value.type.name}
    data = value.data
    if value.type is ValueType.ARRAY:
        kind["element"] = value.item_type.name
        if not full and len(data) > LIST_ITEMS:
            kind["length"], data = len(data), data[:LIST_ITEMS]
        data = [
            value_as_json(item, full) if isinstance(item, Value) else _plain(item, full)
            for item in data
        ]
    else:
        if isinstance(data, str) and not full and len(data) > TEXT_LENGTH:
            kind["length"] = len(data)
        data = _plain(data, full)
    return kind | {"value": data}


def _plain(item: Any, full: bool) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item[:TEXT_LENGTH] if isinstance(item, str) and not full else item
