"""Arcee's Trinity: gated attention, norms before and after both halves of a block, dense layers
first, then experts that sigmoid scores with a bias choose, next to shared ones.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head, in_layers
from .experts import RoutedExperts
from .implied import check_flag, check_name, check_number, global_period
from .layout_options import LayoutOptions
from .leading_dense import gated_rows
from .registry import register
from .weight import Weight

_PERIOD = 4  # every fourth layer has no window and no rotation


@register("AfmoeForCausalLM")
class Afmoe(RoutedExperts):
    """Trinity Nano, Mini and Large; GGUF `afmoe`."""

    gguf_name = "afmoe"
    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "route_scale": 1.0,
        "sliding_window": 1024,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.n_dense = config.integer("num_dense_layers", minimum=0, maximum=self.n_layers)
        self.n_shared = config.integer("num_shared_experts", minimum=0)
        # The class defaults to False, which GGUF cannot say.
        if not config.boolean("mup_enabled", default=False):
            raise ConfigError(
                f"key 'mup_enabled' is not true; GGUF's {name} implies that embeddings are scaled",
                file=config.file,
            )
        check_flag(config, name, "attention_bias", False)
        check_flag(config, name, "route_norm", True)  # the class always norms weights
        check_name(config, name, "score_func", ("sigmoid",))
        for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
            check_number(config, name, key, 1)
        kinds = config.strings("layer_types", default=[])
        default = config.integer("global_attn_every_n_layers", default=_PERIOD)
        period = global_period(config, self.n_layers, default) if kinds else default
        if period != _PERIOD:
            raise ConfigError(
                f"the period of layers with full attention is {period}; GGUF's {name} implies"
                f" {_PERIOD}",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        values = checkpoint.config.of_text().values
        # An absent key has a default; transformers evaluates no model whose window is null.
        if values.get("sliding_window", 0) is None:
            raise ConfigError(
                f"key 'sliding_window' is null; GGUF's {self.gguf_name} implies a window",
                file=checkpoint.config.file,
            )
        return super().read_config(checkpoint)

    def expert_layers(self) -> range:
        return range(self.n_dense, self.n_layers)

    def expert_keys(self) -> dict[str, Value]:
        keys = super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid
        if "n_group" in self.config:
            keys["expert_group_count"] = u32(1)
        if "topk_group" in self.config:
            keys["expert_group_used_count"] = u32(1)
        return keys

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        return {
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.head_size),
            "expert_shared_count": u32(self.n_shared),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(config.number("route_scale")),
            "attention.sliding_window": u32(config.integer("sliding_window")),
        }

    def weights(self) -> list[Weight]:
        d, dense, sparse = self.n_embd, range(self.n_dense), self.expert_layers()
        shared = self.n_shared * self.n_ff_expert
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.post_attention_norm", (d,)),
            Weight(f"{LAYER}.pre_mlp_layernorm", "blk.{}.ffn_norm", (d,)),
            Weight(f"{LAYER}.post_mlp_layernorm", "blk.{}.post_ffw_norm", (d,)),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            Weight(
                f"{LAYER}.self_attn.gate_proj",
                "blk.{}.attn_gate",
                (self.n_heads * self.head_size, d),
            ),
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, dense),
            Weight(
                f"{LAYER}.mlp.router.gate",
                "blk.{}.ffn_gate_inp",
                in_layers(sparse, (self.n_experts, d)),
            ),
            Weight(
                f"{LAYER}.mlp.expert_bias",
                "blk.{}.exp_probs_b.bias",
                in_layers(sparse, (self.n_experts,)),
                exact=True,
            ),
            *(
                gated_rows(
                    f"{LAYER}.mlp.shared_experts", "blk.{{}}.ffn_{}_shexp", d, shared, sparse
                )
                if shared
                else ()
            ),
        ]
