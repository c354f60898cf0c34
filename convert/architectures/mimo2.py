"""MiMo-V2-Flash: layers with a window have sinks and more heads of keys and values than the others;
heads of values are shorter than those of keys; a dense layer first, then experts.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from .blocks import LAYER, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import GLOBAL, LOCAL, check_flag, check_name, check_number
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)

_PERIOD = 6  # of layers without a window, besides the first, where config.json has no key
_SHARE = 0.334  # of a head that is rotated
_VALUE_SCALE = 0.707


@register("MiMoV2FlashForCausalLM")
class MimoV2(RoutedExperts):
    """MiMo-V2-Flash; GGUF `mimo2`. Blocks that predict further tokens are left out, as by
    llama.cpp's converter with `--no-mtp`.
    """

    gguf_name = "mimo2"
    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 192,
        "v_head_dim": 128,
        "rope_theta": 5e6,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.value_size = config.integer("v_head_dim")
        self.window = self._window_layers()
        self.n_dense = self._dense_layers()
        self.n_window_kv_heads = config.integer(
            "swa_num_key_value_heads", default=2 * self.n_kv_heads
        )
        for key, implied in (
            ("swa_num_attention_heads", self.n_heads),
            ("swa_head_dim", self.head_size),
            ("swa_v_head_dim", self.value_size),
            ("n_shared_experts", 0),
        ):
            check_number(config, name, key, implied)
        check_flag(config, name, "attention_bias", False)
        check_flag(config, name, "norm_topk_prob", True)
        check_name(config, name, "scoring_func", ("sigmoid",))
        check_name(config, name, "topk_method", ("noaux_tc",))
        if self.tied:
            log.warning("llama.cpp refuses GGUF's %s with no output matrix of its own", name)
        if not options.vocab_only and any(x.startswith("model.mtp.") for x in checkpoint.tensors):
            log.warning("blocks that predict further tokens are left out")

    def make_rope(self) -> RopeConfig:
        return RopeConfig(self.config, self.head_size, GLOBAL)

    def _window_layers(self) -> list[bool]:
        """Return which layers have the window."""
        config, n = self.config, self.n_layers
        if pattern := config.integers("hybrid_layer_pattern", default=[]):
            if len(pattern) != n or not {*pattern} <= {0, 1}:
                raise ConfigError(
                    f"key 'hybrid_layer_pattern' must have 0 or 1 for each of {n} layers",
                    file=config.file,
                )
            return [kind == 1 for kind in pattern]
        if kinds := config.strings("layer_types", default=[]):
            if len(kinds) != n or not {*kinds} <= {LOCAL, GLOBAL}:
                raise ConfigError(
                    f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {n} layers",
                    file=config.file,
                )
            return [kind == LOCAL for kind in kinds]
        return [layer > 0 and (layer + 1) % _PERIOD != 0 for layer in range(n)]

    def _dense_layers(self) -> int:
        """Return how many leading layers are dense. Raise ConfigError if others are, too."""
        config, n = self.config, self.n_layers
        kinds = config.strings("mlp_layer_types", default=[])
        sparse = config.integers("moe_layer_freq", default=[]) or [
            int(kind == "sparse") for kind in kinds
        ]
        sparse = sparse or [0] + [1] * (n - 1)
        n_dense = sparse.index(1) if 1 in sparse else n
        if sparse != [0] * n_dense + [1] * (n - n_dense):
            raise ConfigError(
                f"the dense ones of {n} layers must come first, in 'moe_layer_freq' or"
                " 'mlp_layer_types'",
                file=config.file,
            )
        return n_dense

    def expert_layers(self) -> range:
        return range(self.n_dense, self.n_layers)

    def text_name(self, name: str) -> str | None:
        return None if name.startswith("model.mtp.") else super().text_name(name)

    def norm_keys(self) -> dict[str, Value]:
        eps = self.config.number("layernorm_epsilon", "rms_norm_eps", default=1e-5)
        return {"attention.layer_norm_rms_epsilon": f32(eps)}

    def rope_keys(self) -> dict[str, Value]:
        by_layers = self.config.section("rope_parameters")
        if by_layers is not None and LOCAL in by_layers:
            local = RopeConfig(self.config, self.head_size, LOCAL).base()
        else:
            local = self.config.number("swa_rope_theta", default=10000.0)
        return super().rope_keys() | {"rope.freq_base_swa": f32(local)}

    def _rotated(self) -> int:
        by_layers = self.config.section("rope_parameters")
        shares = []
        for kind in (GLOBAL, LOCAL):
            own = None if by_layers is None else by_layers.section(kind)
            section = self.config if own is None else own
            shares.append(section.number("partial_rotary_factor", default=_SHARE))
        if shares[0] != shares[1]:
            raise ConfigError(
                f"key 'partial_rotary_factor' is {shares[0]:g} and {shares[1]:g}; GGUF's"
                f" {self.gguf_name} has one for all layers",
                file=self.config.file,
            )
        return int(self.head_size * shares[0])

    def expert_keys(self) -> dict[str, Value]:
        config = self.config
        keys = super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid
        if "n_group" in config and "topk_group" in config:
            groups = config.integer("n_group")
            keys["expert_group_count"] = u32(groups)
            keys["expert_group_used_count"] = u32(config.integer("topk_group", maximum=groups))
        return keys

    def head_size_keys(self) -> dict[str, Value]:
        return super().head_size_keys() | {"attention.value_length": u32(self.value_size)}

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        kv_heads = [self.kv_heads_of(layer) for layer in range(self.n_layers)]
        keys = {
            "attention.head_count_kv": array(ValueType.INT32, kv_heads),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(
                ValueType.INT32, [int(has) for has in self.window]
            ),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "rope.dimension_count": u32(self._rotated()),
        }
        factor = config.number("routed_scaling_factor", default=None)
        if factor is not None and factor != 1:
            log.warning("llama.cpp ignores the scale %g of experts in GGUF's mimo2", factor)
            keys["expert_weights_scale"] = f32(factor)
        # Null says that there is none.
        named = "attention_value_scale" in self.checkpoint.config.of_text().values
        scale = config.number("attention_value_scale", default=None) if named else _VALUE_SCALE
        if scale is not None:
            keys["attention.value_scale"] = f32(scale)
        return keys

    def kv_heads_of(self, layer: int) -> int:
        """Return the heads of keys and values of a layer."""
        return self.n_window_kv_heads if self.window[layer] else self.n_kv_heads

    def weights(self) -> list[Weight]:
        d, config = self.n_embd, self.config
        queries = self.n_heads * self.head_size
        sinks = {
            True: config.boolean("add_swa_attention_sink_bias", default=True),
            False: config.boolean("add_full_attention_sink_bias", default=False),
        }
        return [
            *embedding_and_head(self),
            *norms(self),
            Weight(f"{LAYER}.self_attn.q_proj", "blk.{}.attn_q", (queries, d)),
            *(
                Weight(
                    f"{LAYER}.self_attn.{part}_proj",
                    f"blk.{{}}.attn_{part}",
                    lambda layer, size=size: (self.kv_heads_of(layer) * size, d),
                )
                for part, size in (("k", self.head_size), ("v", self.value_size))
            ),
            Weight(
                f"{LAYER}.self_attn.o_proj",
                "blk.{}.attn_output",
                (d, self.n_heads * self.value_size),
            ),
            Weight(
                f"{LAYER}.self_attn.attention_sink_bias",
                "blk.{}.attn_sinks.weight",
                lambda layer: (self.n_heads,) if sinks[self.window[layer]] else None,
                exact=True,
            ),
            *dense_then_experts(self, self.n_dense, 0, choice_bias=True),
        ]
