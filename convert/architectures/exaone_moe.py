"""K-EXAONE: EXAONE 4.0's attention, but after norms; dense layers first, then experts that sigmoid
scores with a bias choose, next to shared ones; a block that predicts further tokens in `mtp.*`.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig, UnscaledRopeConfig
from .blocks import LAYER, attention, embedding_and_head, in_layers, norms
from .exaone4 import window_layers
from .experts import RoutedExperts
from .implied import check_flag, check_name
from .layout_options import LayoutOptions
from .leading_dense import count_dense_layers, gated_rows
from .mtp import MtpBlocks, name_in_layers
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)


@register("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
class ExaoneMoe(MtpBlocks, RoutedExperts):
    """K-EXAONE; GGUF `exaone-moe`."""

    gguf_name = "exaone-moe"
    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.n_dense = count_dense_layers(config, self.n_main, default=1)
        self.n_shared = config.integer("num_shared_experts")
        check_name(config, name, "scoring_func", ("sigmoid",))
        check_name(config, name, "topk_method", ("noaux_tc",))
        check_flag(config, name, "attention_bias", False)
        if self.tied:
            log.warning("llama.cpp refuses GGUF's %s with no output matrix of its own", name)
        if self.n_mtp > 1:
            raise ConfigError(
                f"key '{self.mtp_key}' is {self.n_mtp}; checkpoints of this class have the tensors"
                " of one block that predicts further tokens",
                file=config.file,
            )

    def make_rope(self) -> RopeConfig:
        return UnscaledRopeConfig(self.config, self.head_size)

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_main)

    def further_name(self, name: str) -> str:
        return name_in_layers(name, self.n_main)

    def rope_keys(self) -> dict[str, Value]:
        return super().rope_keys() | {"rope.scaling.type": string("none")}

    def expert_keys(self) -> dict[str, Value]:
        config = self.config
        keys = super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid
        if "n_group" in config and "topk_group" in config:
            groups = config.integer("n_group")
            keys["expert_group_count"] = u32(groups)
            keys["expert_group_used_count"] = u32(config.integer("topk_group", maximum=groups))
        return keys

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        return {
            "vocab_size": u32(self.n_vocab),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(
                ValueType.BOOL, window_layers(config, self.n_main)
            ),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(self.n_shared),
            "expert_shared_feed_forward_length": u32(self.n_shared * self.n_ff_expert),
            "expert_weights_scale": f32(config.number("routed_scaling_factor")),
            "expert_weights_norm": boolean(config.boolean("norm_topk_prob")),
            "leading_dense_block_count": u32(self.n_dense),
            "nextn_predict_layers": u32(self.n_mtp),
        }

    def weights(self) -> list[Weight]:
        d, sparse = self.n_embd, range(self.n_dense, self.n_main)
        dense = {*range(self.n_layers)} - {*sparse}
        shared = self.n_shared * self.n_ff_expert
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, dense),
            Weight(
                f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", in_layers(sparse, (self.n_experts, d))
            ),
            Weight(
                f"{LAYER}.mlp.e_score_correction_bias",
                "blk.{}.exp_probs_b.bias",
                in_layers(sparse, (self.n_experts,)),
                exact=True,
            ),
            *gated_rows(f"{LAYER}.mlp.shared_experts", "blk.{{}}.ffn_{}_shexp", d, shared, sparse),
            *self.mtp_weights(),
        ]
