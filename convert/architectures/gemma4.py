"""Gemma 4: heads of another size in global layers, keys and values that the last layers share,
inputs per layer, experts next to the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, f32, u32
from ..metadata.rope import ProportionalRopeConfig, RopeConfig
from ..tensors.stored import StoredTensor
from ..vocabulary.gemma4 import gemma4_vocabulary
from ..vocabulary.metadata import vocabulary_metadata
from .blocks import LAYER, embedding_and_head
from .experts import RoutedExperts
from .gemma2 import sandwich_norms
from .implied import GLOBAL, LOCAL, TANH_GELU
from .registry import register
from .weight import ConvertedTensor, Shape, Weight, split_numbers

_KEYS_AND_VALUES = {f"{LAYER}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}


@register("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
class Gemma4(RoutedExperts):
    """Gemma 4, dense and with experts; GGUF `gemma4`."""

    gguf_name = "gemma4"
    activation = ("hidden_activation", TANH_GELU)
    has_window_key = True
    tied_by_default = True
    always_merged = True
    expert_stem = f"{LAYER}.experts"

    def read_expert_sizes(self) -> None:
        self.n_experts = 0
        if self.config.boolean("enable_moe_block", default=False):
            self.n_experts = self.config.integer("num_experts")
            self.n_experts_used = self.config.integer(
                "top_k_experts", "num_experts_per_tok", maximum=self.n_experts
            )
            self.n_ff_expert = self.expert_width()

    def make_rope(self) -> RopeConfig:
        """Read all settings that keys and shapes depend on, and return those of rotary embedding.
        Raise ConfigError for layer types that are not known.
        """
        config = self.config
        self.kinds = config.strings("layer_types")
        if len(self.kinds) != self.n_layers or not {*self.kinds} <= {LOCAL, GLOBAL}:
            raise ConfigError(
                f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {self.n_layers}"
                " layers",
                file=config.file,
            )
        self.key_is_value = config.boolean("attention_k_eq_v", default=False)
        self.global_head_size = self._global("head_dim", "global_head_dim", self.head_size)
        global_key = "num_global_key_value_heads" if self.key_is_value else ""
        self.global_kv_heads = self._global("num_key_value_heads", global_key, self.n_kv_heads)
        self.n_shared = config.integer(
            "num_kv_shared_layers", default=0, minimum=0, maximum=self.n_layers - 1
        )
        self.n_per_layer = config.integer("hidden_size_per_layer_input", default=0, minimum=0)
        self.wide_shared = config.boolean("use_double_wide_mlp", default=False)
        return ProportionalRopeConfig(config, self.global_head_size, GLOBAL)

    def _global(self, key: str, released_key: str, default: int) -> int:
        """Return a size of the global layers, from `per_layer_config`, as newer files have it for
        each layer, or from `released_key`.
        """
        layers = self.config.section("per_layer_config")
        if layers is None:
            return self.config.integer(released_key, default=default) if released_key else default
        sections = [
            layers.section(str(layer)) for layer, kind in enumerate(self.kinds) if kind == GLOBAL
        ]
        found = {
            default if section is None else section.integer(key, default=default)
            for section in sections
        }
        if len(found) > 1:
            raise ConfigError(
                f"key 'per_layer_config' gives global layers different {key}: {sorted(found)}",
                file=self.config.file,
            )
        return found.pop() if found else default

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        keys = super().metadata()
        if self.wide_shared and self.n_shared:
            keys["gemma4.feed_forward_length"] = array(
                ValueType.INT32, [self.width(layer) for layer in range(self.n_layers)]
            )
        if self.global_kv_heads != self.n_kv_heads:
            keys["gemma4.attention.head_count_kv"] = array(
                ValueType.INT32, [self.kv_heads(layer) for layer in range(self.n_layers)]
            )
        return keys

    def expert_keys(self) -> dict[str, Value]:
        return super().expert_keys() if self.n_experts else {}

    def head_size_keys(self) -> dict[str, Value]:
        return {
            "attention.key_length": u32(self.global_head_size),
            "attention.value_length": u32(self.global_head_size),
        }

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        keys = {
            "rope.freq_base_swa": f32(ProportionalRopeConfig(config, self.head_size, LOCAL).base())
        }
        if "final_logit_softcapping" in config:
            keys["final_logit_softcapping"] = f32(config.number("final_logit_softcapping"))
        keys |= {
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "attention.shared_kv_layers": u32(self.n_shared),
            "embedding_length_per_layer_input": u32(self.n_per_layer),
            "attention.sliding_window_pattern": array(
                ValueType.BOOL, [kind == LOCAL for kind in self.kinds]
            ),
            "attention.key_length_swa": u32(self.head_size),
            "attention.value_length_swa": u32(self.head_size),
        }
        if self.n_experts:
            keys["expert_feed_forward_length"] = u32(self.n_ff_expert)
        return keys | {
            "rope.dimension_count": u32(self.global_head_size),
            "rope.dimension_count_swa": u32(self.head_size),
        }

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        return vocabulary_metadata(self.checkpoint, self.n_vocab, pre, gemma4_vocabulary)

    # --- tensors

    def has_own_keys(self, layer: int) -> bool:
        """Return whether a layer computes keys and values; the last layers use those of earlier
        ones.
        """
        return layer < self.n_layers - self.n_shared

    def head(self, layer: int) -> int:
        """Return the head size of a layer."""
        return self.head_size if self.kinds[layer] == LOCAL else self.global_head_size

    def kv_heads(self, layer: int) -> int:
        """Return the key and value heads of a layer."""
        return self.n_kv_heads if self.kinds[layer] == LOCAL else self.global_kv_heads

    def width(self, layer: int) -> int:
        """Return the width of a layer's dense feed-forward."""
        return self.n_ff * (2 if self.wide_shared and not self.has_own_keys(layer) else 1)

    def expert_layers(self) -> Sequence[int]:
        return super().expert_layers() if self.n_experts else range(0)

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern in _KEYS_AND_VALUES and not self.has_own_keys(self.layer_of(tensor, numbers)):
            return  # some checkpoints have keys and values for layers that share those of others
        yield from super().convert(name, tensor, table)

    def weights(self) -> list[Weight]:
        d = self.n_embd

        def keys(layer: int) -> Shape | None:
            return (
                (self.kv_heads(layer) * self.head(layer), d) if self.has_own_keys(layer) else None
            )

        def values(layer: int) -> Shape | None:
            return None if self.key_is_value and self.kinds[layer] == GLOBAL else keys(layer)

        return [
            *embedding_and_head(self),
            *sandwich_norms(self),
            Weight(
                f"{LAYER}.self_attn.q_proj",
                "blk.{}.attn_q",
                lambda layer: (self.n_heads * self.head(layer), d),
            ),
            Weight(f"{LAYER}.self_attn.k_proj", "blk.{}.attn_k", keys),
            Weight(f"{LAYER}.self_attn.v_proj", "blk.{}.attn_v", values),
            Weight(
                f"{LAYER}.self_attn.o_proj",
                "blk.{}.attn_output",
                lambda layer: (d, self.n_heads * self.head(layer)),
            ),
            Weight(
                f"{LAYER}.self_attn.q_norm", "blk.{}.attn_q_norm", lambda layer: (self.head(layer),)
            ),
            Weight(
                f"{LAYER}.self_attn.k_norm",
                "blk.{}.attn_k_norm",
                lambda layer: (self.head(layer),) if self.has_own_keys(layer) else None,
            ),
            Weight(
                f"{LAYER}.mlp.gate_proj", "blk.{}.ffn_gate", lambda layer: (self.width(layer), d)
            ),
            Weight(f"{LAYER}.mlp.up_proj", "blk.{}.ffn_up", lambda layer: (self.width(layer), d)),
            Weight(
                f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", lambda layer: (d, self.width(layer))
            ),
            Weight(f"{LAYER}.layer_scalar", "blk.{}.layer_output_scale.weight", (1,), exact=True),
            *(self._per_layer_inputs() if self.n_per_layer else []),
            *(self._router() if self.n_experts else []),
        ]

    def _per_layer_inputs(self) -> list[Weight]:
        d, n = self.n_embd, self.n_per_layer
        rows = self.config.integer("vocab_size_per_layer_input", default=self.n_vocab)
        return [
            Weight(
                "model.embed_tokens_per_layer", "per_layer_token_embd", (rows, self.n_layers * n)
            ),
            Weight(
                "model.per_layer_model_projection", "per_layer_model_proj", (self.n_layers * n, d)
            ),
            Weight("model.per_layer_projection_norm", "per_layer_proj_norm", (n,)),
            Weight(f"{LAYER}.per_layer_input_gate", "blk.{}.inp_gate", (n, d)),
            Weight(f"{LAYER}.per_layer_projection", "blk.{}.proj", (d, n)),
            Weight(f"{LAYER}.post_per_layer_input_norm", "blk.{}.post_norm", (d,)),
        ]

    def _router(self) -> list[Weight]:
        d, n = self.n_embd, self.n_experts
        return [
            Weight(f"{LAYER}.router.proj", "blk.{}.ffn_gate_inp", (n, d)),
            Weight(f"{LAYER}.router.scale", "blk.{}.ffn_gate_inp.scale", (d,), exact=True),
            Weight(
                f"{LAYER}.router.per_expert_scale", "blk.{}.ffn_down_exps.scale", (n,), exact=True
            ),
            Weight(f"{LAYER}.pre_feedforward_layernorm_2", "blk.{}.pre_ffw_norm_2", (d,)),
            Weight(f"{LAYER}.post_feedforward_layernorm_1", "blk.{}.post_ffw_norm_1", (d,)),
            Weight(f"{LAYER}.post_feedforward_layernorm_2", "blk.{}.post_ffw_norm_2", (d,)),
        ]
