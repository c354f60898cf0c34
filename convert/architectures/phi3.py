"""Phi-3 and Phi-4: query, key and value in one matrix, gate and up in one, and two sets of rotary
factors for long contexts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, u32
from ..metadata.rope import LongRopeConfig
from ..tensors.rows import GeneratedRow
from .base import Architecture
from .blocks import LAYER, embedding_and_head, norms
from .registry import register
from .weight import ConvertedTensor, Weight


@register("Phi3ForCausalLM")
class Phi3(Architecture):
    """Phi-3 and Phi-4; GGUF `phi3`."""

    gguf_name = "phi3"
    has_window_key = True
    always_names_head_size = False

    rope: LongRopeConfig

    def make_rope(self) -> LongRopeConfig:
        section = self.config.section("rope_parameters")
        holder = (
            section if section is not None and "partial_rotary_factor" in section else self.config
        )
        partial = holder.number("partial_rotary_factor", default=1.0)
        self.n_rotated = int(partial * self.head_size)
        if not 0 < self.n_rotated <= self.head_size:
            raise ConfigError(
                f"partial_rotary_factor {partial} gives {self.n_rotated} rotated dimensions of"
                f" {self.head_size}",
                file=self.config.file,
            )
        return LongRopeConfig(self.config, self.n_rotated)

    def family_keys(self) -> dict[str, Value]:
        window = self.config.integer("sliding_window", default=None)
        return {
            "rope.dimension_count": u32(self.n_rotated),
            "attention.sliding_window": u32(window or 0),
        }

    def generated(self) -> Iterator[ConvertedTensor]:
        for which, factors in self.rope.both_factors().items():
            yield ConvertedTensor(
                TensorInfo(f"rope_factors_{which}.weight", factors.shape, TYPES["F32"]),
                GeneratedRow(factors),
            )

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        return [
            *embedding_and_head(self),
            *norms(self),
            Weight(f"{LAYER}.self_attn.qkv_proj", "blk.{}.attn_qkv", (q + 2 * kv, d)),
            Weight(f"{LAYER}.self_attn.o_proj", "blk.{}.attn_output", (d, q)),
            Weight(f"{LAYER}.mlp.gate_up_proj", "blk.{}.ffn_up", (2 * self.n_ff, d)),
            Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, self.n_ff)),
        ]
