"""Kimi Linear: Kimi delta attention (KDA), whose decay is per channel, in most layers, and latent
attention without rotation in the others; experts after the first layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from .blocks import embedding_and_head, norms
from .experts import DOWN, GATE, UP
from .implied import GLOBAL, check_flag, check_name
from .kimi_delta import LINEAR, KimiDeltaLayers
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .registry import register
from .weight import Shape, Weight

# What published configs say in other words than classes with experts and latent attention do.
_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "moe_router_activation_func": "scoring_func",
}


@register("KimiLinearForCausalLM")
class KimiLinear(KimiDeltaLayers):
    """Kimi-Linear-48B-A3B; GGUF `kimi-linear`."""

    gguf_name = "kimi-linear"
    default_scoring = "sigmoid"
    has_selection_bias = True
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w3": UP, "w2": DOWN}
    class_defaults: ClassVar[dict[str, object]] = {
        "max_position_embeddings": 1 << 20,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        check_flag(config, self.gguf_name, "mla_use_nope", True)
        for key in ("moe_renormalize", "norm_topk_prob"):  # either, the name that a file has first
            check_flag(config, self.gguf_name, key, True)
        for key in ("moe_router_activation_func", "scoring_func"):
            check_name(config, self.gguf_name, key, ("sigmoid",))
        if config.integer("n_group", default=1) != 1:
            raise ConfigError(
                f"key 'num_expert_group' is not 1; GGUF's {self.gguf_name} has one group of"
                " experts",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = checkpoint.config.of_text()
        found: dict[str, Any] = {
            new: config.values[old] for old, new in _NAMES.items() if old in config
        }
        if (linear := config.section("linear_attn_config")) is not None:
            found |= {
                f"linear_{new}": linear.integer(old)
                for old, new in (
                    ("head_dim", "head_dim"),
                    ("num_heads", "num_heads"),
                    ("short_conv_kernel_size", "conv_kernel_dim"),
                )
                if old in linear
            }
        # `head_dim` of these configs is the size of no head.
        others = {key: value for key, value in config.values.items() if key != "head_dim"}
        return Config({**others, **found}, config.file).with_defaults(self.class_defaults)

    @property
    def rate_shape(self) -> Shape:
        return 1, 1, self.n_heads, 1

    def layer_kinds(self) -> list[str]:
        """Return the kind of each layer. Raise ConfigError for other kinds, and for layers of no
        kind or of both.
        """
        config = self.config
        if (linear := config.section("linear_attn_config")) is None:
            return super().layer_kinds()
        full, kda = (set(linear.integers(key)) for key in ("full_attn_layers", "kda_layers"))
        both, n = full | kda, self.n_layers
        if full & kda or len(both) != n or min(both) < 1 or max(both) > n:
            raise ConfigError(
                "keys 'full_attn_layers' and 'kda_layers' of 'linear_attn_config' do not name"
                f" each of {n} layers once",
                file=config.file,
            )
        return [GLOBAL if layer + 1 in full else LINEAR for layer in range(n)]

    # --- metadata

    def head_size_keys(self) -> dict[str, Value]:
        keys = {"attention.key_length": u32(self.kv_rank + self.n_rot)}
        if (size := self.checkpoint.config.of_text().integer("head_dim", default=None)) is not None:
            keys["attention.value_length"] = u32(size)  # as the reference, though no head has it
        return keys

    def expert_keys(self) -> dict[str, Value]:
        keys = super().expert_keys()
        keys.pop("expert_group_count", None)  # one
        return keys

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        keys.pop("expert_weights_norm", None)  # runtimes always norm them
        return keys | self.delta_keys()

    # --- tensors

    def text_name(self, name: str) -> str | None:
        found = super().text_name(name)
        return None if found is None else found.replace(".block_sparse_moe.", ".mlp.", 1)

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *self.mixers(),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
        ]
