"""Llama 4, text only: rotation of neighbours in layers that see a chunk of the text, none in the
others; experts whose scores multiply what they read, next to a shared one.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head, norms
from .implied import GLOBAL, check_flag, check_number
from .layout_options import LayoutOptions
from .registry import register
from .transposed_experts import TransposedExperts
from .weight import Weight

_CHUNK, _PERIOD = 8192, 4  # every fourth layer has full attention and no rotation
_PLAIN_EXPERTS = (
    128  # runtimes leave the norms of heads out of files with so many experts (Maverick)
)
CHUNKED = "chunked_attention"


@register("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
class Llama4(TransposedExperts):
    """Llama 4 Scout and Maverick; GGUF `llama4`, which implies most of what config.json says about
    attention.
    """

    gguf_name = "llama4"
    has_window_key = True  # chunks are implied
    pre_names: ClassVar[dict[str, str]] = {"gpt-4o": "llama4"}
    expert_stem = f"{LAYER}.feed_forward.experts"
    # The defaults of the class.
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name, n = self.config, self.gguf_name, self.n_layers
        self.n_ff_expert = self.n_ff
        self.n_ff = config.integer("intermediate_size_mlp")
        self._check_experts()
        check_number(config, name, "attention_chunk_size", _CHUNK)
        check_number(config, name, "floor_scale", _CHUNK)
        check_number(config, name, "attn_scale", 0.1)
        # Published files say 4 or true.
        if config.values.get("attn_temperature_tuning", True) in (False, 0):
            raise ConfigError(
                f"key 'attn_temperature_tuning' is off; GGUF's {name} implies that it is on",
                file=config.file,
            )
        check_flag(config, name, "use_qk_norm", self.n_experts != _PLAIN_EXPERTS)
        rotated = [int((layer + 1) % _PERIOD != 0) for layer in range(n)]
        if (found := config.integers("no_rope_layers", default=[])) not in ([], rotated):
            raise ConfigError(
                f"key 'no_rope_layers' is {found[:8]}; GGUF's {name} implies that every"
                f" {_PERIOD}th layer has no rotation",
                file=config.file,
            )
        if not found:
            check_number(config, name, "no_rope_layer_interval", _PERIOD)
        kinds = [CHUNKED if rotates else GLOBAL for rotates in rotated]
        if config.strings("layer_types", default=kinds) != kinds:
            raise ConfigError(
                f"key 'layer_types' must be {CHUNKED} where layers rotate and {GLOBAL} where they"
                f" do not, as GGUF's {name} implies",
                file=config.file,
            )

    def _check_experts(self) -> None:
        config = self.config
        self.interval = config.integer("interleave_moe_layer_step")
        implied = [*self.expert_layers()]
        if (found := config.integers("moe_layers", default=implied)) != implied:
            raise ConfigError(
                f"key 'moe_layers' is {found[:8]}; interleave_moe_layer_step {self.interval}, the"
                f" key that GGUF's {self.gguf_name} has, implies {implied[:8]}",
                file=config.file,
            )

    def expert_width(self) -> int:
        return self.config.integer("intermediate_size")

    def expert_layers(self) -> range:
        return range(self.interval - 1, self.n_layers, self.interval)

    def family_keys(self) -> dict[str, Value]:
        return {
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.head_size),
            "interleave_moe_layer_step": u32(self.interval),
            "expert_feed_forward_length": u32(self.n_ff_expert),
        }

    def weights(self) -> list[Weight]:
        d, sparse = self.n_embd, self.expert_layers()
        check_flag(self.config, self.gguf_name, "attention_bias", False)

        def matrices(stored: str, gguf: str, width: int, has_experts: bool) -> list[Weight]:
            return [
                Weight(
                    f"{LAYER}.feed_forward.{stored}{part}_proj",
                    f"blk.{{}}.ffn_{part}{gguf}",
                    lambda layer, shape=shape: shape if (layer in sparse) == has_experts else None,
                )
                for part, shape in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width)))
            ]

        router = (self.n_experts, d)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False),
            Weight(
                f"{LAYER}.feed_forward.router",
                "blk.{}.ffn_gate_inp",
                lambda layer: router if layer in sparse else None,
            ),
            *matrices("", "", self.n_ff, False),
            *matrices("shared_expert.", "_shexp", self.n_ff_expert, True),
        ]
