"""OLMoE: Llama's layout with norms of queries and keys over all heads, and routed experts in every
layer.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import check_flag
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)


@register("OlmoeForCausalLM")
class Olmoe(RoutedExperts):
    """OLMoE; GGUF `olmoe`."""

    gguf_name = "olmoe"
    renormalizes = False
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_flag(self.config, self.gguf_name, "attention_bias", False)
        # The reference writes such files without a word. No released model is one.
        for found, what in (
            (self.n_kv_heads != self.n_heads, "fewer key-value heads than heads"),
            (self.tied, "no output matrix of its own"),
        ):
            if found:
                log.warning("llama.cpp refuses GGUF's olmoe with %s", what)

    def expert_width(self) -> int:
        return self.n_ff

    def family_keys(self) -> dict[str, Value]:
        limit = self.config.number("clip_qkv", default=None)
        if limit is not None:
            raise ConfigError(
                f"key 'clip_qkv' is {limit:g}; GGUF's {self.gguf_name} implies null",
                file=self.config.file,
            )
        return {}

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, joined_norms=True),
            Weight(f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, self.n_embd)),
        ]
