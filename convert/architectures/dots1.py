"""dots.llm1: Qwen3's attention; dense layers first, then experts that are chosen as in DeepSeek V3,
with shared ones.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from .blocks import attention, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import LOCAL, check_flag, check_number
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)

_SIGMOID = ("sigmoid", "noaux_tc")  # the second, a way to choose, stood in early configs


@register("Dots1ForCausalLM")
class Dots1(RoutedExperts):
    """dots.llm1; GGUF `dots1`."""

    gguf_name = "dots1"
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_dense = config.integer("first_k_dense_replace", minimum=0, maximum=self.n_layers)
        self.n_shared = config.integer("n_shared_experts")
        check_flag(config, self.gguf_name, "attention_bias", False)
        check_number(config, self.gguf_name, "moe_layer_freq", 1)
        score = config.string("scoring_func", default=_SIGMOID[0])
        if score not in _SIGMOID:
            raise ConfigError(
                f"key 'scoring_func' is '{printable(score)}'; the class of this model computes"
                f" {_SIGMOID[0]}",
                file=config.file,
            )
        # The reference writes such files without a word. No released model is one.
        for found, what in (
            (self.n_kv_heads != self.n_heads, "fewer key-value heads than heads"),
            (self.tied, "no output matrix of its own"),
        ):
            if found:
                log.warning("llama.cpp refuses GGUF's dots1 with %s", what)

    def has_window(self) -> bool:
        if kinds := self.config.strings("layer_types", default=[]):
            return LOCAL in kinds
        return self.config.integer("max_window_layers", minimum=0, default=62) < self.n_layers

    def expert_layers(self) -> range:
        return range(self.n_dense, self.n_layers)

    def expert_keys(self) -> dict[str, Value]:
        keys, config = super().expert_keys(), self.config
        if "n_group" in config and "topk_group" in config:
            groups = config.integer("n_group")
            keys |= {
                "expert_group_count": u32(groups),
                "expert_group_used_count": u32(config.integer("topk_group", maximum=groups)),
            }
        return keys | {"expert_gating_func": u32(2)}  # sigmoid

    def family_keys(self) -> dict[str, Value]:
        return {
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_shared_count": u32(self.n_shared),
            "expert_weights_scale": f32(self.config.number("routed_scaling_factor")),
            "expert_weights_norm": boolean(self.config.boolean("norm_topk_prob")),
        }

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
        ]
