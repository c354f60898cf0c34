"""Laguna: gates of softplus after attention, more heads in layers with a window, two rotations;
dense layers first, then experts that sigmoid scores with a bias choose, next to a shared one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.layer_rope import LayerTypesRopeConfig
from ..tensors.stored import StoredTensor
from ..vocabulary.tokens import CONTROL
from .blocks import LAYER, embedding_and_head, in_layers, norms
from .experts import RoutedExperts
from .implied import GLOBAL, LOCAL, check_flag, check_name, check_number
from .layout_options import LayoutOptions
from .leading_dense import count_dense_layers, gated_rows
from .registry import register
from .weight import ConvertedTensor, Weight, split_numbers

_PERIOD = 4  # every fourth layer from the first on sees all, where GGUF's form has no pattern
_BIAS = f"{LAYER}.mlp.experts.e_score_correction_bias"
_SHARED = f"{LAYER}.mlp.shared_expert"
_PER_HEAD, _PER_ELEMENT = "per_head", "per_element"
_TURN_END = "</assistant>"  # the tokenizer has it as a usual text


@register("LagunaForCausalLM")
class Laguna(RoutedExperts):
    """Laguna XS.2, S-2.1 and M.1; GGUF `laguna`."""

    gguf_name = "laguna"
    has_window_key = True
    rope: LayerTypesRopeConfig
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "moe_routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            GLOBAL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            LOCAL: {"rope_theta": 10000.0},
        },
        "sliding_window": 512,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.near = self._window_layers()
        self.heads = self._heads()
        self.gate_rows = 1 if self._gate() == _PER_HEAD else self.head_size
        self.n_dense = count_dense_layers(config, self.n_layers, default=1)
        self.n_ff_shared = config.integer("shared_expert_intermediate_size")
        check_name(config, name, "moe_router_score_func", ("sigmoid",))
        check_flag(config, name, "norm_topk_prob", True)
        for key in ("attention_bias", "qkv_bias", "moe_apply_router_weight_on_input"):
            check_flag(config, name, key, False)
        check_number(config, name, "moe_router_logit_softcapping", 0)
        dense = config.integers("mlp_only_layers", default=[*range(self.n_dense)])
        if dense != [*range(self.n_dense)]:
            raise ConfigError(
                f"key 'mlp_only_layers' is {dense}, but the first {self.n_dense} layers are dense",
                file=config.file,
            )

    def make_rope(self) -> LayerTypesRopeConfig:
        return LayerTypesRopeConfig(self.config, self.head_size)

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    def _window_layers(self) -> list[bool]:
        """Return which layers have the window; none, unless `layer_types` says so. Raise
        ConfigError for other values.
        """
        config, n = self.config, self.n_layers
        kinds = config.strings("layer_types", default=[GLOBAL] * n)
        if len(kinds) != n or not {*kinds} <= {LOCAL, GLOBAL}:
            raise ConfigError(
                f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {n} layers",
                file=config.file,
            )
        return [kind == LOCAL for kind in kinds]

    def _heads(self) -> list[int]:
        """Return the heads of queries in each layer. Raise ConfigError for other values."""
        config, n = self.config, self.n_layers
        key = "num_attention_heads_per_layer"
        found = config.integers(key, default=[self.n_heads] * n)
        if len(found) != n or any(heads < 1 or heads % self.n_kv_heads for heads in found):
            raise ConfigError(
                f"key '{key}' must have a multiple of num_key_value_heads {self.n_kv_heads} for"
                f" each of {n} layers",
                file=config.file,
            )
        return found

    def _gate(self) -> str:
        """Return whether gates are per head or per element of a head. Raise ConfigError for other
        values, and where `gating_types` differs from `gating`, which the class reads alone.
        """
        config, found = self.config, self.config.values.get("gating", True)
        kind = _PER_HEAD if found is True else str(found).replace("-", "_")
        if kind not in (_PER_HEAD, _PER_ELEMENT):
            raise ConfigError(
                f"key 'gating' is {printable(str(found))}, expected true, per-head or per-element",
                file=config.file,
            )
        kinds = config.strings("gating_types", default=[])
        if any(other.replace("-", "_") != kind for other in kinds):
            raise ConfigError(
                f"key 'gating_types' has other gates than {kind.replace('_', '-')}, which 'gating'"
                " says",
                file=config.file,
            )
        return kind

    def rope_keys(self) -> dict[str, Value]:
        return super().rope_keys() | self.rope.layer_keys()

    def expert_keys(self) -> dict[str, Value]:
        return super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid

    def family_keys(self) -> dict[str, Value]:
        keys = {
            "vocab_size": u32(self.n_vocab),
            "attention.head_count": array(ValueType.INT32, self.heads),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_feed_forward_length": u32(self.n_ff_shared),
            "expert_weights_norm": boolean(True),
            "expert_weights_scale": f32(self.config.number("moe_routed_scaling_factor")),
            "leading_dense_block_count": u32(self.n_dense),
        }
        if any(self.near):
            keys["attention.sliding_window"] = u32(self.config.integer("sliding_window"))
            if self.near != [layer % _PERIOD != 0 for layer in range(self.n_layers)]:
                keys["attention.sliding_window_pattern"] = array(ValueType.BOOL, self.near)
        return keys

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        """Take the template of `chat_template.jinja`, which that of tokenizer_config.json may only
        include; let the end of a turn be a control token, and the second of `eos_token_id`.
        """
        keys = super().vocabulary(pre)
        if (template := self.checkpoint.text("chat_template.jinja")) is not None:
            keys["tokenizer.chat_template"] = string(template)
        ends = self.config.values.get("eos_token_id")
        if isinstance(ends, list):
            begins = self.config.integer("bos_token_id", minimum=0, default=None)
            others = [end for end in self.config.integers("eos_token_id") if end != begins]
            if others:
                keys["tokenizer.ggml.eot_token_id"] = u32(others[0])
        tokens, kinds = keys["tokenizer.ggml.tokens"].data, "tokenizer.ggml.token_type"
        if _TURN_END in tokens:
            found = [*keys[kinds].data]
            found[tokens.index(_TURN_END)] = CONTROL
            keys[kinds] = array(ValueType.INT32, found)
        return keys

    def text_name(self, name: str) -> str | None:
        # The names that transformers has while a model is loaded.
        found = super().text_name(name)
        return found and found.replace(
            ".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"
        ).replace(".mlp.shared_experts.", ".mlp.shared_expert.")

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if split_numbers(name)[0] == _BIAS:  # which no expert has, as the name may seem to say
            yield from super(RoutedExperts, self).convert(name, tensor, table)
        else:
            yield from super().convert(name, tensor, table)

    def weights(self) -> list[Weight]:
        d, size, attn = self.n_embd, self.head_size, f"{LAYER}.self_attn"
        kv, sparse = self.n_kv_heads * size, range(self.n_dense, self.n_layers)

        def per_head(rows: int):
            return lambda layer: (self.heads[layer] * rows, d)

        return [
            *embedding_and_head(self),
            *norms(self),
            Weight(f"{attn}.q_proj", "blk.{}.attn_q", per_head(size)),
            Weight(f"{attn}.k_proj", "blk.{}.attn_k", (kv, d)),
            Weight(f"{attn}.v_proj", "blk.{}.attn_v", (kv, d)),
            Weight(
                f"{attn}.o_proj", "blk.{}.attn_output", lambda layer: (d, self.heads[layer] * size)
            ),
            Weight(f"{attn}.g_proj", "blk.{}.attn_gate", per_head(self.gate_rows)),
            Weight(f"{attn}.q_norm", "blk.{}.attn_q_norm", (size,)),
            Weight(f"{attn}.k_norm", "blk.{}.attn_k_norm", (size,)),
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, range(self.n_dense)),
            *gated_rows(_SHARED, "blk.{{}}.ffn_{}_shexp", d, self.n_ff_shared, sparse),
            Weight(
                f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", in_layers(sparse, (self.n_experts, d))
            ),
            Weight(
                _BIAS, "blk.{}.exp_probs_b.bias", in_layers(sparse, (self.n_experts,)), exact=True
            ),
        ]
