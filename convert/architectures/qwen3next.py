"""Qwen3-Next: gated delta nets and gated attention, with routed experts and a gated shared one in
every layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...formats.source import TensorInfo
from ..tensors.reorder import SelectedRows
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .delta_net import DELTA, DeltaNet
from .registry import register
from .shared_expert import GatedSharedExpert
from .weight import ConvertedTensor, Weight, check_shape, split_numbers

_QKVZ = f"{DELTA}.in_proj_qkvz"


@register("Qwen3NextForCausalLM")
class Qwen3Next(DeltaNet, GatedSharedExpert):
    """Qwen3-Next; GGUF `qwen3next`."""

    gguf_name = "qwen3next"
    renormalizes = True

    def weights(self) -> list[Weight]:
        d, z = self.n_embd, self.n_v * self.v_size
        return [
            *super().weights(),
            *self.expert_weights(),
            Weight(_QKVZ, "blk.{}.attn_qkv", self.recurrent((self.n_channels + z, d))),
            Weight(f"{DELTA}.in_proj_ba", "blk.{}.ssm_ba", self.recurrent((2 * self.n_v, d))),
        ]

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        if weight.stored == _QKVZ:
            return [(f"blk.{{}}.attn_{part}.weight", f"{_QKVZ}.weight") for part in ("qkv", "gate")]
        return super().required(weight)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        layer = self.layer_of(tensor, numbers) if pattern == f"{_QKVZ}.weight" else None
        if layer is None or not self.is_recurrent(layer):
            yield from super().convert(name, tensor, table)
            return
        check_shape(tensor, table[_QKVZ].shape_of(layer))
        stored, type = StoredRows(self.checkpoint, tensor), self.checkpoint.type_of(tensor)
        for part, order in zip(("qkv", "gate"), self._orders()):
            info = TensorInfo(f"blk.{layer}.attn_{part}.weight", (len(order), self.n_embd), type)
            yield ConvertedTensor(info, SelectedRows(stored, order), (tensor,))

    def _orders(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the orders of the stored rows for q, k, v and for z. Stored are q, k, v and z of
        each key head in turn; GGUF has all q, then all k, then all v, and z in another tensor.
        """
        values = self.n_v // self.n_k * self.v_size
        ends = np.cumsum([self.k_size, self.k_size, values, values])
        rows = np.arange(self.n_k * ends[-1]).reshape(self.n_k, ends[-1])
        q, k, v, z = (part.ravel() for part in np.split(rows, ends[:-1], axis=1))
        return np.concatenate([q, k, v]), z
