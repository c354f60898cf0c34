"""Ling 2.0 and Ring 2.0: query, key and value in one matrix; dense layers first, then experts that
are chosen by groups, with a shared one.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, in_layers, norms
from .experts import RoutedExperts
from .implied import check_flag
from .layout_options import LayoutOptions
from .leading_dense import gated_rows
from .mtp import MtpBlocks
from .registry import register
from .weight import Weight

_SHARED = "moe_shared_expert_intermediate_size"


@register("BailingMoeV2ForCausalLM")
class BailingMoe2(MtpBlocks, RoutedExperts):
    """Ling and Ring 2.0; GGUF `bailingmoe2`."""

    gguf_name = "bailingmoe2"
    # Both generations of the model split alike.
    pre_names: ClassVar[dict[str, str]] = {"bailingmoe": "bailingmoe2"}
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 600000.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 1.0,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_dense = config.integer("first_k_dense_replace", minimum=0, maximum=self.n_main)
        self.n_shared = config.integer("num_shared_experts")
        # The class knows no other width. Files name this one, or that of a single shared expert.
        width = self.n_shared * self.n_ff_expert
        self.n_ff_shared = config.integer(_SHARED, default=width)
        if self.n_ff_shared not in (width, self.n_ff_expert):
            raise ConfigError(
                f"key '{_SHARED}' is {self.n_ff_shared}; {self.n_shared} shared experts of"
                f" {self.n_ff_expert} imply {width}",
                file=config.file,
            )

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    def expert_keys(self) -> dict[str, Value]:
        config = self.config
        score = config.string("score_function", default="sigmoid")
        if score != "sigmoid":
            raise ConfigError(
                f"key 'score_function' is '{printable(score)}'; routers of this class take"
                " sigmoids",
                file=config.file,
            )
        groups = config.integer("n_group")
        return super().expert_keys() | {
            "expert_group_count": u32(groups),
            "expert_group_used_count": u32(config.integer("topk_group", maximum=groups)),
            "expert_gating_func": u32(2),  # sigmoid
        }

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        check_flag(config, self.gguf_name, "use_qk_norm", True)
        check_flag(config, self.gguf_name, "use_qkv_bias", False)
        check_flag(config, self.gguf_name, "use_bias", False)
        return {
            "rope.dimension_count": u32(self.rope.rotated()),
            "leading_dense_block_count": u32(self.n_dense),
            "vocab_size": u32(self.n_vocab),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_feed_forward_length": u32(self.n_ff_shared),
            "expert_weights_scale": f32(config.number("routed_scaling_factor")),
            "expert_shared_count": u32(self.n_shared),
            "expert_weights_norm": boolean(config.boolean("norm_topk_prob", default=True)),
            **self.mtp_keys(),
        }

    def mtp_keys(self) -> dict[str, Value]:
        # The reference writes the number where config.json has it, which is mostly 0.
        named = self.mtp_key in self.config and self.options.mtp != "drop"
        return {"nextn_predict_layers": u32(self.n_mtp)} if named else super().mtp_keys()

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        dense, sparse = range(self.n_dense), range(self.n_dense, self.n_layers)
        attn, shared = f"{LAYER}.attention", self.n_shared * self.n_ff_expert
        return [
            Weight("model.word_embeddings", "token_embd", (self.n_vocab, d)),
            Weight("model.norm", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            *norms(self),
            Weight(f"{attn}.query_key_value", "blk.{}.attn_qkv", (q + 2 * kv, d)),
            Weight(f"{attn}.query_layernorm", "blk.{}.attn_q_norm", (self.head_size,)),
            Weight(f"{attn}.key_layernorm", "blk.{}.attn_k_norm", (self.head_size,)),
            Weight(f"{attn}.dense", "blk.{}.attn_output", (d, q)),
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, dense),
            *gated_rows(f"{LAYER}.mlp.shared_experts", "blk.{{}}.ffn_{}_shexp", d, shared, sparse),
            Weight(
                f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", in_layers(sparse, (self.n_experts, d))
            ),
            Weight(
                f"{LAYER}.mlp.gate.expert_bias",
                "blk.{}.exp_probs_b.bias",
                in_layers(sparse, (self.n_experts,)),
                exact=True,
                optional=not self.config.boolean("moe_router_enable_expert_bias", default=True),
            ),
            *self.mtp_weights(),
        ]

    def mtp_weights(self, **line) -> list[Weight]:
        d, further = self.n_embd, range(self.n_main, self.n_layers)
        own = Weight(
            f"{LAYER}.final_layernorm", "blk.{}.layer_output_norm", in_layers(further, (d,))
        )
        # Embedding and head are those of the model, and the last norm has a name of its own.
        kept = [
            weight
            for weight in super().mtp_weights(**line)
            if weight.stored.endswith(("eh_proj", "enorm", "hnorm"))
        ]
        return [*kept, own]
