"""GLM-5.3-Flash, text only: four residual streams; Kimi delta attention, whose decays have a lower
bound, in most layers, and in the others latent attention without rotation, to pools of positions
that an indexer chooses; dense layers first, then experts with a shared one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, embedding_and_head, norms
from .glm_tokens import GlmTokens
from .implied import GLOBAL, check_flag
from .kimi_delta import KimiDeltaLayers
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .mtp import MtpBlocks
from .registry import register
from .streams import stream_keys, stream_weights
from .weight import Shape, Weight

_INDEXER = f"{LAYER}.self_attn.indexer"
_INDEXED = "indexed_attention"  # what transformers calls layers with latent attention
_STREAMS = 4  # the only number that llama.cpp evaluates
_KEY_EPS = 1e-6  # of the norm of the indexer's keys, in the class


@register("Glm5NextForConditionalGeneration")
class Glm5Next(GlmTokens, MtpBlocks, KimiDeltaLayers):
    """GLM-5.3-Flash; GGUF `glm5-next`."""

    gguf_name = "glm5-next"
    default_scoring = "sigmoid"
    least_rotated = 0
    class_defaults: ClassVar[dict[str, object]] = {
        "num_attention_heads": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "linear_lower_bound": -5.0,
        "swiglu_limit": 10.0,
        "hc_mult": _STREAMS,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 16,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.kinds += [GLOBAL] * self.n_mtp
        check_flag(config, name, "mla_use_nope", True)
        check_flag(config, name, "mhc", True)
        check_flag(config, name, "tie_word_embeddings", False)
        check_flag(config, name, "index_kpool_always_select_tail", True)
        self.bound = config.number("linear_lower_bound", positive=False)
        if not self.bound < 0:
            raise ConfigError(
                f"key 'linear_lower_bound' is {self.bound:g}, expected a number below 0",
                file=config.file,
            )
        if (streams := config.integer("hc_mult")) != _STREAMS:
            raise ConfigError(
                f"key 'hc_mult' is {streams}; GGUF's {name} implies {_STREAMS}", file=config.file
            )
        if self.q_rank is None:
            raise ConfigError("key 'q_lora_rank' is missing", file=config.file)
        if self.n_rot:
            raise ConfigError(
                f"key 'qk_rope_head_dim' is {self.n_rot}; GGUF's {name} implies 0", file=config.file
            )
        self.n_index_heads = config.integer("index_n_heads")
        self.index_size, self.pool = (
            config.integer("index_head_dim"),
            config.integer("index_kpool", minimum=2),
        )
        self.top_k = config.integer("index_topk")
        if self.top_k % self.pool:
            raise ConfigError(
                f"index_topk {self.top_k} is not a multiple of index_kpool {self.pool}",
                file=config.file,
            )
        self.selects = self._indexers()

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = checkpoint.config.of_text()
        found: dict[str, Any] = {}
        if (linear := config.section("linear_attn_config")) is not None:
            for old, new in (
                ("head_dim", "linear_head_dim"),
                ("num_heads", "linear_num_heads"),
                ("short_conv_kernel_size", "linear_conv_kernel_dim"),
                ("gate_lower_bound", "linear_lower_bound"),
            ):
                if linear.values.get(old) is not None:
                    found[new] = linear.values[old]
            check_flag(linear, self.gguf_name, "safe_gate", True)
        # `head_dim` is that of rotated keys, which there are none of.
        others = {key: value for key, value in config.values.items() if key != "head_dim"}
        return Config({**others, **found}, config.file).with_defaults(self.class_defaults)

    def _derived_head_size(self) -> int:
        return self.config.integer("qk_rope_head_dim", minimum=0)

    def layer_kinds(self) -> list[str]:
        kinds = self.config.strings("layer_types", default=[])
        return self.checked_kinds(
            [GLOBAL if kind == _INDEXED else kind for kind in kinds], self.n_layers
        )

    def _indexers(self) -> list[bool]:
        """Return whether each layer has an indexer of its own, as far as its kind can; nothing if
        all have. Raise ConfigError for other words.
        """
        types = self.config.strings("indexer_types", default=[])
        if types and (len(types) != self.n_main or not set(types) <= {"full", "shared"}):
            raise ConfigError(
                f"key 'indexer_types' must say full or shared for each of {self.n_main} layers",
                file=self.config.file,
            )
        return [kind == "full" for kind in types]

    # --- metadata

    def rope_keys(self) -> dict[str, Value]:
        """Nothing is rotated."""
        return {}

    def norm_keys(self) -> dict[str, Value]:
        return super().norm_keys() | {"attention.layer_norm_epsilon": f32(_KEY_EPS)}

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys() | self.delta_keys()
        keys |= {
            "kda.gate_lower_bound": f32(self.bound),
            "expert_weights_norm": boolean(self.config.boolean("norm_topk_prob")),
            "attention.indexer.head_count": u32(self.n_index_heads),
            "attention.indexer.key_length": u32(self.index_size),
            "attention.indexer.top_k": u32(self.top_k),
            "attention.indexer.kpool": u32(self.pool),
            "attention.indexer.kpool_select_tail": boolean(True),
            **stream_keys(self.config),
            **self.mtp_keys(),
        }
        if self.selects:
            keys["attention.indexer.types"] = array(ValueType.BOOL, self.selects)
        limits = [self.config.number("swiglu_limit")] * self.n_layers
        for name in ("exp", "shexp"):
            keys[f"swiglu_clamp_{name}"] = array(ValueType.FLOAT32, limits)
        return keys

    # --- tensors

    def _indexed(self, *shape: int) -> Callable[[int], Shape | None]:
        """Return a shape that only layers with an indexer have."""

        def shape_in(layer: int) -> Shape | None:
            shared = layer < len(self.selects) and not self.selects[layer]
            return None if shared or self.kinds[layer] != GLOBAL else shape

        return shape_in

    def weights(self) -> list[Weight]:
        d, size, heads = self.n_embd, self.index_size, self.n_index_heads
        return [
            *embedding_and_head(self),
            *norms(self),
            *self.mixers(),
            *stream_weights(LAYER, _STREAMS, d, self.n_main),
            Weight(f"{_INDEXER}.k_norm", "blk.{}.indexer.k_norm", self._indexed(size), bias=True),
            Weight(f"{_INDEXER}.weights_proj", "blk.{}.indexer.proj", self._indexed(heads, d)),
            Weight(f"{_INDEXER}.wk", "blk.{}.indexer.attn_k", self._indexed(size, d)),
            Weight(
                f"{_INDEXER}.wq_b",
                "blk.{}.indexer.attn_q_b",
                self._indexed(heads * size, self.q_rank or 0),
            ),
            *(
                Weight(
                    f"{_INDEXER}.index_kpool_compress_{part}",
                    f"blk.{{}}.indexer_compressor_{part}.weight",
                    self._indexed(*shape),
                    exact=True,
                )
                for part, shape in (("ape", (self.pool, size)), ("gate", (size, d)))
            ),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
            *self.mtp_weights(),
        ]
