"""Qwen3.5, dense and with experts.

Value heads are reordered. Stored heads that belong to the same key head are neighbours; in GGUF
value head j reads key head j modulo the number of key heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import SelectedColumns, SelectedRows
from ..tensors.stored import StoredTensor
from .blocks import gated_feed_forward
from .delta_net import DELTA, DeltaNet
from .layout_options import LayoutOptions
from .registry import register
from .shared_expert import GatedSharedExpert
from .weight import ConvertedTensor, Weight

_SECTIONS = [11, 11, 10]  # the classes' default: pairs rotated by time, height, width


class _Qwen35(DeltaNet):
    mtp_key = "mtp_num_hidden_layers"

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.value_heads = np.arange(self.n_v).reshape(self.n_k, -1).T.ravel()

    def rope_keys(self) -> dict[str, Value]:
        section = self.config.section("rope_parameters", "rope_scaling")
        sizes = (
            _SECTIONS if section is None else section.integers("mrope_section", default=_SECTIONS)
        )
        if len(sizes) > 4 or min(sizes, default=0) < 0:
            raise ConfigError(
                f"key 'mrope_section' is {sizes}, expected at most four sizes",
                file=self.config.file,
            )
        return {
            "rope.dimension_sections": array(ValueType.INT32, [*sizes, 0, 0, 0, 0][:4]),
            **super().rope_keys(),
        }

    def weights(self) -> list[Weight]:
        d, z = self.n_embd, self.n_v * self.v_size
        return [
            *super().weights(),
            Weight(f"{DELTA}.in_proj_qkv", "blk.{}.attn_qkv", self.recurrent((self.n_channels, d))),
            Weight(f"{DELTA}.in_proj_z", "blk.{}.attn_gate", self.recurrent((z, d))),
            Weight(f"{DELTA}.in_proj_a", "blk.{}.ssm_alpha", self.recurrent((self.n_v, d))),
            Weight(f"{DELTA}.in_proj_b", "blk.{}.ssm_beta", self.recurrent((self.n_v, d))),
        ]

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        part = weight.stored.removeprefix(f"{DELTA}.")
        if self.n_v == self.n_k or part not in (
            "in_proj_qkv",
            "conv1d",
            "in_proj_z",
            "in_proj_a",
            "in_proj_b",
            "out_proj",
        ):
            return made
        if part == "out_proj":
            return replace(
                made, rows=SelectedColumns(made.rows, self.value_rows(self.v_size), made.info.type)
            )
        order = self.value_rows(1 if part in ("in_proj_a", "in_proj_b") else self.v_size)
        if part in ("in_proj_qkv", "conv1d"):
            before = self.n_channels - len(order)  # channels of queries and keys
            order = np.concatenate([np.arange(before), before + order])
        return replace(made, rows=SelectedRows(made.rows, order))


@register("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
class Qwen35(_Qwen35):
    """Qwen3.5 without experts; GGUF `qwen35`."""

    gguf_name = "qwen35"

    def weights(self) -> list[Weight]:
        return [*super().weights(), *gated_feed_forward(self)]


@register("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
class Qwen35Moe(_Qwen35, GatedSharedExpert):
    """Qwen3.5 with experts; GGUF `qwen35moe`."""

    gguf_name = "qwen35moe"

    def weights(self) -> list[Weight]:
        return [*super().weights(), *self.expert_weights()]
