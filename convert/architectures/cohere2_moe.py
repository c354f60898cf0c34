"""Cohere's models with experts: attention side by side with experts, or with a dense layer in
leading blocks; windows in most layers, and rotations only there and in dense ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import DefaultRopeConfig, RopeConfig
from .blocks import LAYER, attention, embedding_and_head
from .cohere import ZeroBiases
from .experts import RoutedExperts
from .implied import GLOBAL, LOCAL, check_flag, check_name, check_number
from .layout_options import LayoutOptions
from .leading_dense import count_dense_layers, dense_then_experts
from .mtp import MtpBlocks
from .registry import register
from .weight import Weight

_PERIOD = 4  # of layers with full attention, in configs that do not say
_SCORES = {"softmax": 1, "sigmoid": 2}


@register("Cohere2MoeForCausalLM")
@register("Cohere2VisionForConditionalGeneration", model_type="cohere2_moe")
class Cohere2Moe(ZeroBiases, MtpBlocks, RoutedExperts):
    """North Mini Code, and the text model of Command A+; GGUF `cohere2moe`."""

    gguf_name = "cohere2moe"
    tied_by_default = True
    has_window_key = True
    pre_names: ClassVar[dict[str, str]] = {"tiny_aya": "cohere2moe"}
    class_defaults: ClassVar[dict[str, object]] = {
        "expert_selection_fn": "softmax",
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "sliding_window": 4096,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        # In configs this is the width of an expert.
        self.n_ff = config.integer("prefix_dense_intermediate_size", default=self.n_ff_expert)
        self.n_dense = count_dense_layers(config, self.n_main, default=0)
        self.n_shared = config.integer("num_shared_experts", minimum=0)
        self.near = self._window_layers()
        check_name(config, name, "expert_selection_fn", tuple(_SCORES))
        check_name(config, name, "position_embedding_type", ("rope_gptj",))
        check_flag(config, name, "attention_bias", False)
        check_flag(config, name, "use_qk_norm", False)
        check_flag(config, name, "use_parallel_block", True)
        check_number(config, name, "rotary_pct", 1)
        if self.n_shared:
            check_name(config, name, "shared_expert_combination_strategy", ("average",))
        if config.integer("prefix_dense_sliding_window_pattern", default=1) != 1 and not all(
            self.near[: self.n_dense]
        ):
            raise ConfigError(
                "key 'prefix_dense_sliding_window_pattern' is not 1, and a dense layer has no"
                f" window; GGUF's {name} implies that its heads are rotated",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        values = checkpoint.config.of_text().values
        # An absent key has a default; without a window the class rotates no heads.
        if values.get("sliding_window", 0) is None:
            raise ConfigError(
                f"key 'sliding_window' is null; GGUF's {self.gguf_name} implies a window",
                file=checkpoint.config.file,
            )
        return super().read_config(checkpoint)

    def make_rope(self) -> RopeConfig:
        return DefaultRopeConfig(self.config, self.head_size)

    def expert_width(self) -> int:
        return self.config.integer("intermediate_size")

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    def _window_layers(self) -> list[bool]:
        """Return which layers have the window: those of `layer_types`, or else all but every so
        many, counted from the first after the dense ones. Raise ConfigError for other values.
        """
        config, n = self.config, self.n_main
        if kinds := config.strings("layer_types", default=[]):
            if len(kinds) != n or not {*kinds} <= {LOCAL, GLOBAL}:
                raise ConfigError(
                    f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {n} layers",
                    file=config.file,
                )
            return [kind == LOCAL for kind in kinds]
        first = config.integer("first_k_dense_replace", default=0, minimum=0, maximum=n)
        before = config.integer("prefix_dense_sliding_window_pattern", default=1)
        after = config.integer("sliding_window_pattern", default=_PERIOD)
        return [
            (layer + 1) % before != 0 if layer < first else (layer - first + 1) % after != 0
            for layer in range(n)
        ]

    def norm_keys(self) -> dict[str, Value]:
        """Return the epsilon of RMS norms, where the model has these, and that of LayerNorms."""
        rms = self.config.number("rms_norm_eps", default=None)
        found = {} if rms is None else {"attention.layer_norm_rms_epsilon": f32(rms)}
        epsilon = f32(self.config.number("layer_norm_eps"))
        return found | {"attention.layer_norm_epsilon": epsilon}

    def expert_keys(self) -> dict[str, Value]:
        scores = _SCORES[self.config.string("expert_selection_fn")]
        return super().expert_keys() | {"expert_gating_func": u32(scores)}

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        # The class norms weights by softmax whatever the key says.
        normed = config.string("expert_selection_fn") == "softmax"
        normed = normed or config.boolean("norm_topk_prob")
        shared = self.n_shared * self.n_ff_expert
        return {
            "logit_scale": f32(config.number("logit_scale")),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(ValueType.BOOL, self.near),
            "vocab_size": u32(self.n_vocab),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_weights_norm": boolean(normed),
            **({"expert_shared_count": u32(self.n_shared)} if shared else {}),
            **({"expert_shared_feed_forward_length": u32(shared)} if shared else {}),
            **self.mtp_keys(),
            "rope.dimension_count": u32(self.head_size),
            "rope.scaling.type": string("none"),
        }

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (self.n_embd,)),
            *attention(self, bias=False, output_bias=False),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=False),
            *self._mtp_weights(),
        ]

    def _mtp_weights(self) -> list[Weight]:
        """Return the usual tensors of an MTP block, which may lack the norm before the output."""
        return [
            replace(row, optional=row.optional or row.stored.endswith("shared_head.norm"))
            for row in self.mtp_weights()
        ]
