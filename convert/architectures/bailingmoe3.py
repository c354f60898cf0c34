"""Ling 3.0: Kimi delta attention, whose decays have a lower bound, in most layers, and latent
attention with a gate for each head in the others; experts that are chosen by groups, with a shared
one, after the dense layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, embedding_and_head, in_layers, norms
from .implied import GLOBAL, check_flag, check_name
from .kimi_delta import ATTN, LINEAR, KimiDeltaLayers
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .mtp import MtpBlocks
from .registry import register
from .weight import Shape, Weight, split_numbers

_SHARED = "moe_shared_expert_intermediate_size"
# Settings that transformers 5 saves in other words than published configs have.
_LARGEST = 3.4028234e38  # in float32
_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "score_function": "scoring_func",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Parts of stored names -> what other models with these layers call them.
_STORED = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}
_HEAD_GATES = "head_gates"  # the gates of latent attention, which are stored as those of others


@register("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
class BailingMoe3(MtpBlocks, KimiDeltaLayers):
    """Ling 3.0; GGUF `bailingmoe3`."""

    gguf_name = "bailingmoe3"
    default_scoring = "sigmoid"
    low_rank = False
    rate_sign = 1
    # Every generation of the model splits alike.
    pre_names: ClassVar[dict[str, str]] = {"bailingmoe": "bailingmoe2"}
    class_defaults: ClassVar[dict[str, object]] = {
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 2,
        "layer_group_size": 6,
        "routed_scaling_factor": 2.5,
        "kda_lower_bound": -5.0,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.kinds += [GLOBAL] * self.n_mtp
        check_flag(config, name, "tie_word_embeddings", False)  # the class ties nothing
        check_flag(config, name, "kda_safe_gate", True)
        check_flag(config, name, "no_kda_lora", True)
        check_flag(config, name, "use_qkv_bias", False)
        check_flag(config, name, "use_mla_nope", False)
        check_flag(config, name, "moe_router_enable_expert_bias", True)
        check_name(config, name, "gated_attention_proj_granularity_type", ("head_wise",))
        check_name(config, name, "scoring_func", ("sigmoid",))
        self.bound = config.number("kda_lower_bound", positive=False)
        if not self.bound < 0:
            raise ConfigError(
                f"key 'kda_lower_bound' is {self.bound:g}, expected a number below 0",
                file=config.file,
            )
        width = self.n_shared * self.n_ff_expert
        if (said := config.integer(_SHARED, default=width)) != width:
            raise ConfigError(
                f"key '{_SHARED}' is {said}; {self.n_shared} shared experts of {self.n_ff_expert}"
                f" imply {width}",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = checkpoint.config.of_text()
        found: dict[str, Any] = {}
        for old, new in _NAMES.items():
            if old not in config:
                continue
            found[new] = config.values[old]
            if new in config and config.values[new] != found[new]:
                raise ConfigError(
                    f"keys '{old}' and '{new}' are {printable(found[new], 40)} and"
                    f" {printable(config.values[new], 40)}",
                    file=config.file,
                )
        # Published, `head_dim` is that of the delta nets; transformers saves another one.
        if "linear_head_dim" not in config and "head_dim" in config:
            found["linear_head_dim"] = config.values["head_dim"]
        others = {key: value for key, value in config.values.items() if key != "head_dim"}
        return Config({**others, **found}, config.file).with_defaults(self.class_defaults)

    def layer_kinds(self) -> list[str]:
        config, n = self.config, self.n_layers
        if config.strings("layer_types", default=[]):
            return super().layer_kinds()
        group = config.integer("layer_group_size")
        if n % group:
            raise ConfigError(
                f"num_hidden_layers {n} is not a multiple of layer_group_size {group}, and"
                " 'layer_types' does not say what the last layers are",
                file=config.file,
            )
        return [LINEAR if (i + 1) % group else GLOBAL for i in range(n)]

    @property
    def rate_shape(self) -> Shape:
        return self.n_heads, 1

    # --- metadata

    def head_size_keys(self) -> dict[str, Value]:
        return {
            "attention.key_length": u32(self.kv_rank + self.n_rot),
            "attention.value_length": u32(self.n_linear),  # as the reference
        }

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys() | self.delta_keys()
        keys["expert_weights_norm"] = boolean(self.config.boolean("norm_topk_prob"))
        keys |= {
            "kda.safe_gate": boolean(True),
            "kda.gate_lower_bound": f32(self.bound),
            "expert_shared_feed_forward_length": u32(self.n_shared * self.n_ff_expert),
            **self.mtp_keys(),
        }
        for name, key in (("exp", "expert"), ("shexp", "share_expert")):
            if (limits := self._limits(f"{key}_swiglu_limit_list")) is not None:
                keys[f"swiglu_clamp_{name}"] = array(ValueType.FLOAT32, limits)
        return keys

    def _limits(self, key: str) -> list[float] | None:
        """Return the limit of each layer, 0 for none, of a list that may be shorter or have null;
        None without a list. Raise ConfigError for other values.
        """
        found = self.config.values.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or not all(
            x is None or (type(x) in (int, float) and 0 <= x <= _LARGEST) for x in found
        ):
            raise ConfigError(
                f"key '{key}' is not a list of numbers from 0 to {_LARGEST:g}, or null",
                file=self.config.file,
            )
        most = self.n_main + self.config.integer("num_nextn_predict_layers", default=0)
        if any(found[most:]):
            raise ConfigError(
                f"key '{key}' has limits of {len(found)} layers, of which the model has {most}",
                file=self.config.file,
            )
        limits = [float(x or 0) for x in found[: self.n_layers]]
        return limits + [0.0] * (self.n_layers - len(limits))

    # --- tensors

    def text_name(self, name: str) -> str | None:
        found = super().text_name(name)
        return None if found is None else self._with_head_gates(found)

    def further_name(self, name: str) -> str:
        for stored, own in _STORED.items():
            name = name.replace(stored, own, 1)
        return name

    def _with_head_gates(self, name: str) -> str:
        pattern, numbers = split_numbers(name)
        if pattern != f"{ATTN}.g_proj.weight" or not numbers[0] < self.n_layers:
            return name
        gates = self.kinds[numbers[0]] == GLOBAL
        return name.replace(".g_proj.", f".{_HEAD_GATES}.") if gates else name

    def required(self, weight: Weight) -> list[tuple[str, str]]:
        return [(gguf, _published(stored)) for gguf, stored in super().required(weight)]

    def weights(self) -> list[Weight]:
        gates = self.in_kind(GLOBAL, (self.n_heads, self.n_embd))
        return [
            *embedding_and_head(self),
            *norms(self),
            *self.mixers(),
            Weight(f"{ATTN}.{_HEAD_GATES}", "blk.{}.attn_gate", gates),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
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


def _published(name: str) -> str:
    """Return the name that a tensor of the table has in published checkpoints."""
    name = name.replace(f".{_HEAD_GATES}.", ".g_proj.")
    for stored, own in _STORED.items():
        # Delta nets and latent attention call their last matrix differently.
        if "dense" not in stored:
            name = name.replace(own, stored, 1)
    return name
