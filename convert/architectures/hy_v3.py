"""Hunyuan 3: norms of query and key heads before the rotation; dense layers first, then experts
that sigmoid scores with a bias choose, next to shared ones; a block that predicts further tokens.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import PlainRopeConfig, RopeConfig
from .blocks import LAYER, attention, embedding_and_head, in_layers, norms
from .experts import RoutedExperts
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .leading_dense import count_dense_layers, gated_rows
from .mtp import MtpBlocks
from .registry import register
from .weight import Weight

# What published configs can say and runtimes imply.
_FLAGS = {
    "qk_norm": True,
    "attention_bias": False,
    "mlp_bias": False,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
}
_LAST_NORM = re.compile(r"(model\.layers\.\d+)\.final_layernorm\.")


@register("HYV3ForCausalLM", "HyV3ForCausalLM")
class HyV3(MtpBlocks, RoutedExperts):
    """Hy3, Hy3-preview, Hy-MT2-30B-A3B; GGUF `hy_v3`."""

    gguf_name = "hy_v3"
    # They split texts as DeepSeek V3 does.
    pre_names: ClassVar[dict[str, str]] = {"deepseek-v3": "hunyuan-dense"}
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "router_scaling_factor": 2.826,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.n_dense = count_dense_layers(config, self.n_main, default=1)
        self.n_shared = config.integer("num_shared_experts")
        for key, implied in _FLAGS.items():
            check_flag(config, name, key, implied)
        # The width of experts has two names; programs differ in which one they read.
        check_number(config, name, "expert_hidden_dim", self.n_ff_expert)
        if not config.boolean("route_norm", default=True):
            raise ConfigError(
                "key 'route_norm' is false: llama.cpp would not divide weights of experts by their"
                " sum, transformers does it all the same",
                file=config.file,
            )

    def make_rope(self) -> RopeConfig:
        return PlainRopeConfig(self.config, self.head_size)

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    def further_name(self, name: str) -> str:
        """Return the name of the last norm of an MTP block as other families call it."""
        return _LAST_NORM.sub(r"\1.shared_head.norm.", name)

    def family_keys(self) -> dict[str, Value]:
        return {
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_feed_forward_length": u32(self.n_shared * self.n_ff_expert),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(self.config.number("router_scaling_factor")),
            "expert_gating_func": u32(2),  # sigmoid, the only one of this class
            **self.mtp_keys(),
        }

    def weights(self) -> list[Weight]:
        d, sparse = self.n_embd, range(self.n_dense, self.n_layers)
        shared = self.n_shared * self.n_ff_expert
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, range(self.n_dense)),
            Weight(
                f"{LAYER}.mlp.router.gate",
                "blk.{}.ffn_gate_inp",
                in_layers(sparse, (self.n_experts, d)),
            ),
            Weight(
                f"{LAYER}.mlp.expert_bias",
                "blk.{}.exp_probs_b",
                in_layers(sparse, (self.n_experts,)),
                exact=True,
            ),
            *gated_rows(f"{LAYER}.mlp.shared_mlp", "blk.{{}}.ffn_{}_shexp", d, shared, sparse),
            *self.mtp_weights(),
        ]
