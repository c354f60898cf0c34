"""Rows of a family's table of weights, and the tensors that they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ...formats.types import TYPES, GGMLType
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import OneRow, PairedRotaryRows, PlusOneRows, StoredRows
from ..tensors.stored import StoredTensor, TensorRows

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One row of a family's table: where a tensor is stored, its GGUF name and its shape (numpy
    order, row length last).

    Names have no suffix (`.weight`, `.bias`) unless they are `exact`; `{}` is the number of the
    layer. Where layers differ, `shape` is a function of the layer, and None means that the layer
    has no such tensor.
    """

    stored: str
    gguf: str
    shape: Shape | Callable[[int], Shape | None]
    bias: bool = False  # there is a vector `.bias` too
    rotary_heads: int = 0  # heads whose rows are reordered into rotary pairs
    optional: bool = False
    exact: bool = False  # both names are whole names
    plus_one: bool = False  # the model multiplies by 1 + weight, so 1 is added

    @property
    def per_layer(self) -> bool:
        """Whether the stored name has a place for the layer."""
        return "{}" in self.stored

    def shape_of(self, layer: int | None) -> Shape | None:
        """Return the shape [rows, columns] or [n] in a layer, None where the layer lacks the
        weight. layer: None for weights outside of layers.
        """
        if not callable(self.shape):
            return self.shape
        assert layer is not None, f"{self.stored} has a shape per layer but no layer in its name"
        return self.shape(layer)


@dataclass(frozen=True)
class ConvertedTensor:
    """An output tensor and the rows it is made of. `made_of` lists the stored tensors whose
    matrices become its matrices, if there are such tensors.
    """

    info: TensorInfo
    rows: TensorRows
    made_of: tuple[StoredTensor, ...] = ()


def weight_rows(
    checkpoint: Checkpoint, tensor: StoredTensor, weight: Weight, shape: Shape
) -> tuple[TensorRows, GGMLType]:
    """Return the rows that `tensor` becomes in a row of the table, with `shape` [rows, columns] or
    [n], and their type.
    """
    type = checkpoint.type_of(tensor)
    if weight.rotary_heads and len(shape) == 1:
        rows: TensorRows = OneRow(
            PairedRotaryRows(StoredRows(checkpoint, tensor, shape[0]), weight.rotary_heads)
        )
    elif weight.rotary_heads:
        rows = PairedRotaryRows(StoredRows(checkpoint, tensor), weight.rotary_heads)
    else:
        rows = StoredRows(checkpoint, tensor)
    if weight.plus_one:
        return PlusOneRows(rows, type, shape[-1]), TYPES["F32"]
    return rows, type


def check_shape(tensor: StoredTensor, shape: Shape | None) -> None:
    """Raise CheckpointError unless `tensor` has the shape that config.json asks for. None: the
    layer has no such tensor.
    """
    if shape is None:
        raise CheckpointError(
            "is in a layer that has no such tensor", file=tensor.file, tensor=tensor.name
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"has shape {list(tensor.shape)}, config.json implies {list(shape)}",
            file=tensor.file,
            tensor=tensor.name,
        )


def split_numbers(name: str) -> tuple[str, list[int]]:
    """Split `model.layers.3.mlp.experts.5.up_proj` into (`model.layers.{}.mlp.experts.{}.up_proj`,
    [3, 5]).
    """
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 10]
    return (
        ".".join(
            "{}" if part.isascii() and part.isdigit() and len(part) < 10 else part for part in parts
        ),
        numbers,
    )
