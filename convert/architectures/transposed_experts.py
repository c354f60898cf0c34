"""Experts that are stored transposed, those of a layer in one tensor: [n_experts, n_embd, 2 n_ff],
with gate columns before up columns, and [n_experts, n_ff, n_embd].
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ..tensors.reorder import TransposedMatrices
from ..tensors.rows import ConcatenatedRows, RowRange, StoredRows
from ..tensors.stored import StoredTensor
from .experts import RoutedExperts
from .weight import ConvertedTensor, Weight, check_shape, split_numbers


class TransposedExperts(RoutedExperts):
    """Convert such experts, where `are_transposed`. Packed checkpoints may have one matrix for each
    expert instead.
    """

    are_transposed = True

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        part = pattern.removeprefix(f"{self.expert_stem}.").removesuffix(".weight")
        if part not in ("gate_up_proj", "down_proj") or not self.are_transposed:
            yield from super().convert(name, tensor, table)
            return
        layer = self.layer_of(tensor, numbers)
        n, ff, d = self.n_experts, self.n_ff_expert, self.n_embd
        if layer not in self.expert_layers():
            raise CheckpointError(
                f"layer {layer} has no experts", file=tensor.file, tensor=tensor.name
            )
        type, stored = self.checkpoint.type_of(tensor), StoredRows(self.checkpoint, tensor)
        made = f"blk.{layer}.ffn_{{}}_exps.weight"
        if part == "down_proj":
            check_shape(tensor, (n, ff, d))
            rows = TransposedMatrices(stored, n, type)
            yield ConvertedTensor(TensorInfo(made.format("down"), (n, d, ff), type), rows)
            return
        check_shape(tensor, (n, d, 2 * ff))
        both = TransposedMatrices(stored, n, type)
        if self.merge_gate_up:
            yield ConvertedTensor(TensorInfo(made.format("gate_up"), (n, 2 * ff, d), type), both)
            return
        for half, kind in enumerate(("gate", "up")):
            ranges = [RowRange(both, (2 * expert + half) * ff, ff) for expert in range(n)]
            info = TensorInfo(made.format(kind), (n, ff, d), type)
            yield ConvertedTensor(info, ConcatenatedRows(ranges))
