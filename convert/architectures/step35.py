"""Step-3.5-Flash: layers with a window have more heads, rotated whole and by another base; a gate
of each head; dense layers first, then experts next to a shared one, limited in some layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import FirstHalfRopeConfig, RopeConfig
from ..tensors.stored import StoredTensor
from .blocks import LAYER, in_layers
from .experts import DOWN, GATE, UP, RoutedExperts
from .implied import GLOBAL, LOCAL, check_flag, check_name, check_number
from .layout_options import LayoutOptions
from .leading_dense import gated_rows
from .mtp import MtpBlocks
from .registry import register
from .weight import ConvertedTensor, Weight, split_numbers

log = logging.getLogger(__name__)

_SHARES = {LOCAL: 1.0, GLOBAL: 0.5}  # of a head that is rotated
_STACKS = {f"{LAYER}.moe.{part}_proj.weight": part for part in (GATE, UP, DOWN)}


@register("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
class Step35(MtpBlocks, RoutedExperts):
    """Step-3.5-Flash, and the text model of Step-3.7-Flash; GGUF `step35`."""

    gguf_name = "step35"
    has_window_key = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        # Blocks that predict further tokens have entries in the lists, too.
        self.kinds = self._kinds()
        other = config.section("attention_other_setting")
        sizes = config if other is None else other
        self.near_heads = sizes.integer("num_attention_heads", default=self.n_heads)
        self.near_kv_heads = sizes.integer("num_attention_groups", default=self.n_kv_heads)
        if self.near_heads % self.near_kv_heads:
            raise ConfigError(
                f"in layers with a window, num_attention_heads {self.near_heads} is not a multiple"
                f" of num_attention_groups {self.near_kv_heads}",
                file=config.file,
            )
        for key in ("head_dim", "true_head_dim"):
            check_number(sizes, name, key, self.head_size)
        check_name(sizes, name, "attention_type", (LOCAL,))
        for key in ("zero_centered", "use_qk_norm"):
            check_flag(config, name, key, True)
        for key in ("attention_bias", "mlp_bias", "sink"):
            check_flag(config, name, key, False)
        check_name(config, name, "moe_router_activation", ("sigmoid",))
        self.gates = config.boolean("use_head_wise_attn_gate")
        self.choice_bias = config.boolean("use_moe_router_bias")
        self.sparse = self._sparse()
        if self.tied:
            log.warning("llama.cpp refuses GGUF's %s with no output matrix of its own", name)

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = super().read_config(checkpoint)
        groups = {"num_key_value_heads": config.integer("num_attention_groups")}
        return Config(config.values | groups, config.file)

    def read_expert_sizes(self) -> None:
        self.n_experts = self.config.integer("moe_num_experts")
        self.n_experts_used = self.config.integer("moe_top_k", maximum=self.n_experts)
        self.n_ff_expert = self.expert_width()

    def make_rope(self) -> RopeConfig:
        rope = FirstHalfRopeConfig(self.config, self.head_size, self._base(GLOBAL))
        only = self.config.strings("yarn_only_types", default=[])
        if rope.kind != "default" and only != [GLOBAL]:
            raise ConfigError(
                f"key 'yarn_only_types' is {only}; GGUF's {self.gguf_name} scales frequencies in"
                f" layers with {GLOBAL} only",
                file=self.config.file,
            )
        return rope

    def _list(self, key: str) -> list:
        """Return a list with a value for each layer, and possibly for further blocks. Raise
        ConfigError if it is missing or shorter.
        """
        config, value = self.config, self.config.values.get(key)
        least = config.integer("num_hidden_layers")
        if not isinstance(value, list) or len(value) < least:
            raise ConfigError(
                f"key '{key}' must be a list with a value for each of {least} layers",
                file=config.file,
            )
        return value

    def _base(self, kind: str) -> float:
        """Return the base of the rotation in layers of a kind, where `rope_theta` has one for each
        layer. Raise ConfigError if they differ.
        """
        config = self.config
        if not isinstance(config.values.get("rope_theta"), list):
            return config.number("rope_theta")
        pairs = zip(self._list("layer_types"), self._list("rope_theta"), strict=False)
        found = [Config({"rope_theta": base}, config.file) for own, base in pairs if own == kind]
        bases = sorted({base.number("rope_theta") for base in found})
        if len(bases) > 1:
            raise ConfigError(
                f"key 'rope_theta' has {bases[0]:g} and {bases[1]:g} in layers with {kind}; GGUF's"
                f" {self.gguf_name} has one for all of these",
                file=config.file,
            )
        return bases[0] if bases else 10000.0

    def _kinds(self) -> list[str]:
        """Return whether each layer and block has a window. Raise ConfigError for another kind, or
        where another share of heads is rotated than GGUF implies for it.
        """
        kinds, shares = self._list("layer_types"), self._list("partial_rotary_factors")
        for layer, (kind, share) in enumerate(zip(kinds, shares, strict=False)):
            if kind not in _SHARES or share != _SHARES[kind]:
                raise ConfigError(
                    f"layer {layer} has '{kind}' in 'layer_types' and {share} in"
                    f" 'partial_rotary_factors'; GGUF's {self.gguf_name} implies {LOCAL} with 1,"
                    f" or {GLOBAL} with 0.5",
                    file=self.config.file,
                )
        further = [GLOBAL] * (self.n_layers - len(kinds))  # as llama.cpp's converter has it
        return [*kinds, *further][: self.n_layers]

    def _sparse(self) -> list[int]:
        """Return the layers that have experts, by `moe_layers_enum`. Raise ConfigError for what is
        no list of numbers of layers.
        """
        config = self.config
        text = config.string("moe_layers_enum")
        numbers = [item.strip() for item in text.split(",")]
        if not all(item.isdecimal() and int(item) < self.n_main for item in numbers):
            raise ConfigError(
                f"key 'moe_layers_enum' is '{text}', expected numbers of {self.n_main} layers,"
                " with commas between them",
                file=config.file,
            )
        return sorted(map(int, numbers))

    def expert_layers(self) -> list[int]:
        return [layer for layer in self.sparse if layer >= self.first_layer]

    def further_name(self, name: str) -> str:
        return name.replace(".transformer.shared_head.output", ".shared_head.head").replace(
            ".transformer.shared_head.", ".shared_head."
        )

    def norm_keys(self) -> dict[str, Value]:
        eps = self.config.number("rms_norm_eps", default=1e-5)
        return {"attention.layer_norm_rms_epsilon": f32(eps)}

    def rope_keys(self) -> dict[str, Value]:
        keys = super().rope_keys()
        if isinstance(self.config.values.get("rope_theta"), list):
            keys["rope.freq_base_swa"] = f32(self._base(LOCAL))
        return keys

    def expert_keys(self) -> dict[str, Value]:
        return super().expert_keys() | {"expert_gating_func": u32(2)}  # sigmoid

    def _limits(self, key: str) -> list[float] | None:
        """Return the limit of what experts join in each layer and block, 0 for none; None if
        config.json lacks the key. Raise ConfigError for a value that is none.
        """
        if key not in self.config:
            return None
        found = [0.0 if limit is None else limit for limit in self._list(key)]
        for layer, limit in enumerate(found):
            if type(limit) not in (int, float) or not 0 <= limit < math.inf:
                raise ConfigError(
                    f"key '{key}' has {limit!r} for layer {layer}, expected a limit, or 0 for none",
                    file=self.config.file,
                )
        found = [float(limit) for limit in found[: self.n_layers]]
        return [*found, *[0.0] * (self.n_layers - len(found))]

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the heads of queries, and of keys and values, of a layer."""
        near = self.kinds[layer] == LOCAL
        return (self.near_heads, self.near_kv_heads) if near else (self.n_heads, self.n_kv_heads)

    def family_keys(self) -> dict[str, Value]:
        config, near = self.config, [kind == LOCAL for kind in self.kinds]
        both = [self.heads_of(layer) for layer in range(self.n_layers)]
        keys = {
            "attention.head_count": array(ValueType.INT32, [heads for heads, _ in both]),
            "attention.head_count_kv": array(ValueType.INT32, [heads for _, heads in both]),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(ValueType.BOOL, near),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_feed_forward_length": u32(config.integer("share_expert_dim")),
            "leading_dense_block_count": u32(self.sparse[0]),
            "moe_every_n_layers": u32(config.integer("moe_every_n_layer", default=1)),
            "expert_weights_norm": boolean(config.boolean("norm_expert_weight")),
            **self.mtp_keys(),
        }
        if "moe_router_scaling_factor" in config:
            keys["expert_weights_scale"] = f32(config.number("moe_router_scaling_factor"))
        for name, key in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared")):
            if (limits := self._limits(key)) is not None:
                keys[f"swiglu_clamp_{name}"] = array(ValueType.FLOAT32, limits)
        return keys

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if pattern not in _STACKS:
            yield from super().convert(name, tensor, table)
            return
        yield from self.stack(self.layer_of(tensor, numbers)).stacked(_STACKS[pattern], tensor)

    def weights(self) -> list[Weight]:
        d, size, vocabulary = self.n_embd, self.head_size, (self.n_vocab, self.n_embd)
        attn, shared = f"{LAYER}.self_attn", self.config.integer("share_expert_dim")

        def per_head(rows: int, keys: bool = False):
            return lambda layer: (self.heads_of(layer)[keys] * rows, d)

        return [
            Weight("model.embed_tokens", "token_embd", vocabulary),
            Weight("model.norm", "output_norm", (d,), plus_one=True),
            Weight("lm_head", "output", vocabulary, optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), plus_one=True),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,), plus_one=True),
            Weight(f"{attn}.q_proj", "blk.{}.attn_q", per_head(size)),
            Weight(f"{attn}.k_proj", "blk.{}.attn_k", per_head(size, keys=True)),
            Weight(f"{attn}.v_proj", "blk.{}.attn_v", per_head(size, keys=True)),
            Weight(
                f"{attn}.o_proj",
                "blk.{}.attn_output",
                lambda layer: (d, self.heads_of(layer)[0] * size),
            ),
            *([Weight(f"{attn}.g_proj", "blk.{}.attn_gate", per_head(1))] if self.gates else []),
            Weight(f"{attn}.q_norm", "blk.{}.attn_q_norm", (size,), plus_one=True),
            Weight(f"{attn}.k_norm", "blk.{}.attn_k_norm", (size,), plus_one=True),
            *self._feed_forward(shared),
            *self.mtp_weights(plus_one=True),
        ]

    def _feed_forward(self, shared: int) -> list[Weight]:
        d, n, sparse = self.n_embd, self.n_experts, {*self.sparse}
        dense = {*range(self.n_layers)} - sparse
        rows = [
            *gated_rows(f"{LAYER}.mlp", "blk.{{}}.ffn_{}", d, self.n_ff, dense),
            *gated_rows(f"{LAYER}.share_expert", "blk.{{}}.ffn_{}_shexp", d, shared, sparse),
            Weight(f"{LAYER}.moe.gate", "blk.{}.ffn_gate_inp", in_layers(sparse, (n, d))),
        ]
        if self.choice_bias:
            bias = f"{LAYER}.moe.router_bias", "blk.{}.exp_probs_b.bias"
            rows.append(Weight(*bias, in_layers(sparse, (n,)), exact=True))
        return rows
