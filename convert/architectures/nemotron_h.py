"""Nemotron-H and Nemotron 3: every layer is either a state-space layer of Mamba-2, attention
without positions, or a feed-forward layer with squared ReLU, dense or with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .base import Architecture
from .blocks import in_layers
from .experts import RoutedExperts
from .implied import SILU, check_flag, check_name
from .layer_pattern import ATTENTION, DENSE, EXPERTS, MAMBA, layer_kinds
from .layout_options import LayoutOptions
from .mamba2 import Mamba2
from .mtp import MtpBlocks
from .registry import register
from .weight import ConvertedTensor, Shape, Weight

_MIXER = "model.layers.{}.mixer"
_LONGEST = 1 << 20  # what the reference writes as the length of texts, as there are no positions
_MAX_LAYERS = 1 << 16
# Of the block that predicts further tokens, which is stored as two.
_FURTHER = {
    "mtp.layers.1.norm.weight": "post_attention_layernorm.weight",
    "mtp.layers.1.final_layernorm.weight": "shared_head.norm.weight",
}


@register("NemotronHForCausalLM")
class NemotronH(MtpBlocks, RoutedExperts):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3; GGUF `nemotron_h`, with experts
    `nemotron_h_moe`.

    kinds: a character for each layer, as in `hybrid_override_pattern`.
    """

    gguf_name = "nemotron_h"
    other_names = ("nemotron_h_moe",)
    activation = ("mlp_hidden_act", ("relu2",))
    expert_stem = f"{_MIXER}.experts"
    has_gates = False
    # The last three: what the class of transformers adds to configs that were published before it.
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 8,
        "layer_norm_epsilon": 1e-5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.mamba = Mamba2(
            _MIXER,
            config.integer("mamba_num_heads"),
            config.integer("mamba_head_dim"),
            config.integer("ssm_state_size"),
            config.integer("n_groups", "mamba_n_groups"),
            config.integer("conv_kernel", "mamba_d_conv"),
            config.boolean("use_conv_bias", "mamba_conv_bias", default=True),
        )
        self.mamba.check(config)
        check_name(config, self.gguf_name, "mamba_hidden_act", SILU)
        check_flag(config, self.gguf_name, "use_bias", False)
        check_flag(config, self.gguf_name, "mamba_proj_bias", False)
        if self.has_experts:
            check_flag(config, self.gguf_name, "mlp_bias", False)
        if self.n_mtp > 1:
            raise ConfigError(
                f"key '{self.mtp_key}' is {self.n_mtp}; GGUF's {self.gguf_name} has one block that"
                " predicts further tokens",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = super().read_config(checkpoint)
        self.kinds = layer_kinds(config)
        self.has_experts = EXPERTS in self.kinds
        if self.has_experts:
            self.gguf_name = "nemotron_h_moe"
            if DENSE in self.kinds:
                raise ConfigError(
                    "some layers have experts and others a dense feed-forward; GGUF's"
                    f" {self.gguf_name} has either",
                    file=config.file,
                )
        found: dict[str, Any] = {"num_hidden_layers": len(self.kinds)}
        if self.has_experts:
            found["intermediate_size"] = 1  # no layer has this width
        if (head := config.integer("attention_head_dim", default=None)) is not None:
            found["head_dim"] = head
        config = config.with_defaults(found)
        if config.integer("num_hidden_layers", maximum=_MAX_LAYERS) != len(self.kinds):
            raise ConfigError(
                f"key 'num_hidden_layers' is {config.integer('num_hidden_layers')}, and"
                f" {len(self.kinds)} layers are described",
                file=config.file,
            )
        if not self.has_experts:
            config.values.pop(self.mtp_key, None)  # GGUF has such blocks with experts only
        return config

    def read_expert_sizes(self) -> None:
        self.n_experts = self.n_experts_used = self.n_ff_expert = 0
        self.n_latent = None
        if self.has_experts:
            super().read_expert_sizes()
            self.n_latent = self.config.integer("moe_latent_size", default=None)

    @property
    def expert_io(self) -> int:
        return self.n_latent or self.n_embd

    def expert_layers(self) -> list[int]:
        layers = range(self.first_layer, self.n_layers)
        return [layer for layer in layers if self._is(layer, EXPERTS)]

    def _is(self, layer: int, *kinds: str) -> bool:
        """Return whether a layer is of one of these kinds. The block that predicts further tokens
        has attention and experts.
        """
        if layer < self.n_main:
            return self.kinds[layer] in kinds
        return ATTENTION in kinds or EXPERTS in kinds

    def _in(self, *kinds: str) -> Callable[[Shape], Callable[[int], Shape | None]]:
        """Return what makes a shape that of the layers of these kinds."""
        return lambda shape: lambda layer: shape if self._is(layer, *kinds) else None

    # --- metadata

    def norm_keys(self) -> dict[str, Value]:
        keys = {"attention.layer_norm_epsilon": f32(self.config.number("layer_norm_epsilon"))}
        if other := self.config.number("rms_norm_eps", "norm_eps", default=None):
            # Runtimes read this one first.
            keys = {"attention.layer_norm_rms_epsilon": f32(other), **keys}
            if other != self.config.number("layer_norm_epsilon"):
                raise ConfigError(
                    f"keys 'norm_eps' and 'layer_norm_epsilon' differ: {other:g} and"
                    f" {self.config.number('layer_norm_epsilon'):g}",
                    file=self.config.file,
                )
        return keys

    def rope_keys(self) -> dict[str, Value]:
        named = "rope_theta" in self.config or "rope_parameters" in self.config
        return super().rope_keys() if named else {}

    def expert_keys(self) -> dict[str, Value]:
        if not self.has_experts:
            return {}
        config, groups = self.config, self.config.integer("n_group")
        return {
            **super().expert_keys(),
            "expert_group_count": u32(groups),
            "expert_group_used_count": u32(config.integer("topk_group", maximum=groups)),
        }

    def family_keys(self) -> dict[str, Value]:
        layers = range(self.n_layers)
        hidden = self.n_ff_expert if self.has_experts else self.config.integer("intermediate_size")
        keys = {
            "context_length": u32(_LONGEST),
            "feed_forward_length": array(
                ValueType.INT32,
                [hidden if self._is(layer, DENSE, EXPERTS) else 0 for layer in layers],
            ),
            "attention.head_count_kv": array(
                ValueType.INT32,
                [self.n_kv_heads if self._is(layer, ATTENTION) else 0 for layer in layers],
            ),
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.n_embd // self.n_heads),
            **self.mamba.keys,
            "rope.scaling.finetuned": boolean(False),
        }
        if self.has_experts:
            config = self.config
            keys |= {
                "expert_feed_forward_length": u32(hidden),
                "expert_shared_feed_forward_length": u32(self.n_ff_shared),
                "expert_shared_count": u32(config.integer("n_shared_experts")),
                "expert_weights_norm": boolean(config.boolean("norm_topk_prob")),
                "expert_weights_scale": f32(config.number("routed_scaling_factor")),
            }
            if self.n_latent:
                keys["moe_latent_size"] = u32(self.n_latent)
        return keys | self.mtp_keys()

    @property
    def n_ff_shared(self) -> int:
        """The width of the shared expert."""
        return self.config.integer("moe_shared_expert_intermediate_size")

    # --- tensors

    def text_name(self, name: str) -> str | None:
        text = super().text_name(name.replace("backbone.", "model.", 1))
        return None if text is not None and text.startswith("mtp.") else text

    def further_name(self, name: str) -> str:
        if not self.has_experts or not name.startswith(("mtp.layers.0.", "mtp.layers.1.")):
            return name
        rest = _FURTHER.get(name, name.split(".", 3)[3])
        return f"model.layers.{self.n_main}.{rest}"

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        attention = self._in(ATTENTION)
        biased = self.config.boolean("attention_bias", default=False)
        further = range(self.n_main, self.n_layers)
        return [
            Weight("model.embeddings", "token_embd", (self.n_vocab, d)),
            Weight("model.norm_f", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight("model.layers.{}.norm", "blk.{}.attn_norm", (d,)),
            *self.mamba.weights(d, self._in(MAMBA)),
            # The reference reorders them as for rotations; scores are the same.
            Weight(
                f"{_MIXER}.q_proj",
                "blk.{}.attn_q",
                attention((q, d)),
                bias=biased,
                rotary_heads=self.n_heads,
            ),
            Weight(
                f"{_MIXER}.k_proj",
                "blk.{}.attn_k",
                attention((kv, d)),
                bias=biased,
                rotary_heads=self.n_kv_heads,
            ),
            Weight(f"{_MIXER}.v_proj", "blk.{}.attn_v", attention((kv, d)), bias=biased),
            Weight(f"{_MIXER}.o_proj", "blk.{}.attn_output", attention((d, q)), bias=biased),
            *(self._experts() if self.has_experts else self._dense()),
            Weight(
                "model.layers.{}.post_attention_layernorm",
                "blk.{}.post_attention_norm",
                in_layers(further, (d,)),
            ),
            *self.mtp_weights(),
        ]

    def _dense(self) -> list[Weight]:
        d, ff, dense = self.n_embd, self.config.integer("intermediate_size"), self._in(DENSE)
        biased = self.config.boolean("mlp_bias", default=False)
        return [
            Weight(f"{_MIXER}.up_proj", "blk.{}.ffn_up", dense((ff, d)), bias=biased),
            Weight(f"{_MIXER}.down_proj", "blk.{}.ffn_down", dense((d, ff)), bias=biased),
        ]

    def _experts(self) -> list[Weight]:
        d, ff, experts = self.n_embd, self.n_ff_shared, self._in(EXPERTS)
        shared = f"{_MIXER}.shared_experts"
        table = [
            Weight(f"{_MIXER}.gate", "blk.{}.ffn_gate_inp", experts((self.n_experts, d))),
            Weight(
                f"{_MIXER}.gate.e_score_correction_bias",
                "blk.{}.exp_probs_b.bias",
                experts((self.n_experts,)),
                exact=True,
            ),
            Weight(f"{shared}.up_proj", "blk.{}.ffn_up_shexp", experts((ff, d))),
            Weight(f"{shared}.down_proj", "blk.{}.ffn_down_shexp", experts((d, ff))),
        ]
        if n := self.n_latent:
            table += [
                Weight(f"{_MIXER}.fc1_latent_proj", "blk.{}.ffn_latent_down", experts((n, d))),
                Weight(f"{_MIXER}.fc2_latent_proj", "blk.{}.ffn_latent_up", experts((d, n))),
            ]
        return table

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if self.has_experts:
            yield from super().convert(name, tensor, table)
        else:
            yield from Architecture.convert(self, name, tensor, table)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if suffix == "bias":
            return made
        return self.mamba.shaped(self.checkpoint, tensor, weight, made)
