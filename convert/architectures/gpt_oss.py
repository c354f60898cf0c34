"""gpt-oss: attention with sinks, and experts with biases whose gate and up rows alternate, as
16-bit floats or as MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ...errors import CheckpointError
from ...formats.source import TensorInfo
from ...formats.types import TYPES, GGMLType
from ...formats.values import Value, u32
from ..tensors.mxfp4 import BLOCK_CODES, MXFP4Rows
from ..tensors.reorder import EveryOtherRow, SelectedColumns, TransposedMatrices
from ..tensors.rows import ConcatenatedRows, RowRange, StoredRows
from ..tensors.stored import StoredTensor, TensorRows
from .blocks import LAYER, attention, embedding_and_head
from .experts import RoutedExperts
from .implied import check_alternating, check_number
from .registry import register
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

_PARTS = ("down_proj", "gate_up_proj")


@register("GptOssForCausalLM")
class GptOss(RoutedExperts):
    """gpt-oss; GGUF `gpt-oss`."""

    gguf_name = "gpt-oss"
    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 64}

    def expert_width(self) -> int:
        return self.n_ff

    def family_keys(self) -> dict[str, Value]:
        check_number(self.config, self.gguf_name, "swiglu_limit", 7.0)
        check_alternating(self.config, self.n_layers)
        return {
            "attention.sliding_window": u32(self.config.integer("sliding_window")),
            "expert_feed_forward_length": u32(self.n_ff_expert),
        }

    def weights(self) -> list[Weight]:
        d = self.n_embd
        biased = self.config.boolean("attention_bias", default=True)
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.post_attention_norm", (d,)),
            *attention(self, bias=biased, output_bias=biased),
            Weight(
                f"{LAYER}.self_attn.sinks", "blk.{}.attn_sinks.weight", (self.n_heads,), exact=True
            ),
            Weight(f"{LAYER}.mlp.router", "blk.{}.ffn_gate_inp", (self.n_experts, d), bias=True),
        ]

    def tensors(self) -> list[ConvertedTensor]:
        self._halves: dict[str, StoredTensor] = {}
        mapped = super().tensors()
        names = {tensor.info.name for tensor in mapped}
        for layer in self.expert_layers():
            for stored, part in zip(_PARTS, ("down", "gate_up" if self.merge_gate_up else "gate")):
                if f"blk.{layer}.ffn_{part}_exps.bias" not in names:
                    name = f"{self.expert_stem.format(layer)}.{stored}_bias"
                    raise CheckpointError(
                        "is missing from the checkpoint", file=self.checkpoint.path, tensor=name
                    )
        return mapped

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        part, _, kind = pattern.removeprefix(f"{self.expert_stem}.").partition("_proj")
        known = f"{part}_proj" in _PARTS and kind in ("", "_bias", "_blocks", "_scales")
        if not pattern.startswith(f"{self.expert_stem}.") or not known:
            yield from super().convert(name, tensor, table)
            return
        layer = self.layer_of(tensor, numbers)
        n_rows, n_cols = (
            (self.n_embd, self.n_ff) if part == "down" else (2 * self.n_ff, self.n_embd)
        )
        if kind == "_bias":
            check_shape(tensor, (self.n_experts, n_rows))
            yield from self._biases(layer, part, tensor)
        elif kind == "":
            check_shape(tensor, (self.n_experts, n_cols, n_rows))
            yield from self._floats(layer, part, tensor)
        else:
            n_blocks, rest = divmod(n_cols, BLOCK_CODES)
            check_shape(
                tensor,
                (
                    self.n_experts,
                    n_rows,
                    n_blocks,
                    *((BLOCK_CODES // 2,) if kind == "_blocks" else ()),
                ),
            )
            if rest or tensor.dtype != "U8":
                raise CheckpointError(
                    f"dtype {tensor.dtype} with rows of {n_cols} is not MXFP4",
                    file=tensor.file,
                    tensor=tensor.name,
                )
            stem = name.removesuffix(kind)
            other = self._halves.pop(stem + ("_scales" if kind == "_blocks" else "_blocks"), None)
            if other is None:
                self._halves[name] = tensor
            else:
                blocks, scales = (tensor, other) if kind == "_blocks" else (other, tensor)
                total = self.n_experts * n_rows
                rows = MXFP4Rows(
                    StoredRows(self.checkpoint, blocks, total),
                    StoredRows(self.checkpoint, scales, total),
                )
                interleaved = (EveryOtherRow(rows, 0), EveryOtherRow(rows, 1))
                yield from self._weights(layer, part, TYPES["MXFP4"], rows, interleaved)

    def _floats(self, layer: int, part: str, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        """Return rows of a tensor that is stored transposed: [n_experts, n_cols, n_rows]."""
        type, stored = self.checkpoint.type_of(tensor), StoredRows(self.checkpoint, tensor)

        def rows(columns: slice) -> TensorRows:
            return TransposedMatrices(stored, self.n_experts, type, columns)

        yield from self._weights(
            layer, part, type, rows(slice(None)), (rows(slice(0, None, 2)), rows(slice(1, None, 2)))
        )

    def _weights(
        self,
        layer: int,
        part: str,
        type: GGMLType,
        whole: TensorRows,
        interleaved: tuple[TensorRows, TensorRows],
    ) -> Iterator[ConvertedTensor]:
        """Yield the output tensors of a projection. `whole` are the rows of all experts;
        `interleaved` are its even and odd rows, which are gate and up.
        """
        n, ff, d = self.n_experts, self.n_ff, self.n_embd
        name = f"blk.{layer}.ffn_{{}}_exps.weight"
        if part == "down":
            yield ConvertedTensor(TensorInfo(name.format(part), (n, d, ff), type), whole)
        elif self.merge_gate_up:
            pairs = [RowRange(half, expert * ff, ff) for expert in range(n) for half in interleaved]
            yield ConvertedTensor(
                TensorInfo(name.format("gate_up"), (n, 2 * ff, d), type), ConcatenatedRows(pairs)
            )
        else:
            for half, rows in zip(("gate", "up"), interleaved):
                yield ConvertedTensor(TensorInfo(name.format(half), (n, ff, d), type), rows)

    def _biases(self, layer: int, part: str, tensor: StoredTensor) -> Iterator[ConvertedTensor]:
        type, stored = self.checkpoint.type_of(tensor), StoredRows(self.checkpoint, tensor)
        name = f"blk.{layer}.ffn_{{}}_exps.bias"
        if part == "down":
            yield ConvertedTensor(TensorInfo(name.format(part), tensor.shape, type), stored)
            return
        gate, up = np.arange(0, 2 * self.n_ff, 2), np.arange(1, 2 * self.n_ff, 2)
        order = (
            {"gate_up": np.concatenate([gate, up])}
            if self.merge_gate_up
            else {"gate": gate, "up": up}
        )
        for half, columns in order.items():
            yield ConvertedTensor(
                TensorInfo(name.format(half), (self.n_experts, len(columns)), type),
                SelectedColumns(stored, columns, type),
            )
