"""GLM-5 and DeepSeek V3.2: latent attention to positions that an indexer selects, experts as in
DeepSeek V3, and MTP blocks.
"""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER
from .glm_tokens import GlmTokens
from .latent import LatentAttention
from .layout_options import LayoutOptions
from .mtp import MtpBlocks
from .registry import register
from .weight import Shape, Weight

_INDEXER = f"{LAYER}.self_attn.indexer"


class SparseAttention(MtpBlocks, LatentAttention):
    """The common part: layers have an indexer, or see what that of an earlier layer selects."""

    default_scoring = "sigmoid"
    has_selection_bias = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.n_index_heads, self.index_size = (
            self.config.integer("index_n_heads"),
            self.config.integer("index_head_dim"),
        )
        # Whether layers have an indexer. Empty: all have.
        self.selects: list[bool] = []

    def indexers(self, default: list[str]) -> list[bool]:
        """Return whether each layer has an indexer, as `indexer_types` or `default` says; nothing
        if these say nothing. Raise ConfigError for other words.
        """
        types = self.config.strings("indexer_types", default=[]) or default
        if types and (len(types) != self.n_main or not set(types) <= {"full", "shared"}):
            raise ConfigError(
                f"key 'indexer_types' must say full or shared for each of {self.n_main} layers",
                file=self.config.file,
            )
        return [kind == "full" for kind in types]

    def family_keys(self) -> dict[str, Value]:
        return {
            **super().family_keys(),
            **self.mtp_keys(),
            "attention.indexer.head_count": u32(self.n_index_heads),
            "attention.indexer.key_length": u32(self.index_size),
            "attention.indexer.top_k": u32(self.config.integer("index_topk")),
        }

    def weights(self) -> list[Weight]:
        def of(*shape: int):
            def shape_in(layer: int) -> Shape | None:
                return None if layer < len(self.selects) and not self.selects[layer] else shape

            return shape_in

        d, size, heads = self.n_embd, self.index_size, self.n_index_heads
        return [
            *super().weights(),
            Weight(f"{_INDEXER}.k_norm", "blk.{}.indexer.k_norm", of(size), bias=True),
            Weight(f"{_INDEXER}.weights_proj", "blk.{}.indexer.proj", of(heads, d)),
            Weight(f"{_INDEXER}.wk", "blk.{}.indexer.attn_k", of(size, d)),
            Weight(f"{_INDEXER}.wq_b", "blk.{}.indexer.attn_q_b", of(heads * size, self.q_rank)),
            *self.mtp_weights(),
        ]


@register("DeepseekV32ForCausalLM")
class DeepseekV32(SparseAttention):
    """DeepSeek V3.2; GGUF `deepseek32`."""

    gguf_name = "deepseek32"


@register("GlmMoeDsaForCausalLM")
class GlmMoeDsa(GlmTokens, SparseAttention):
    """GLM-5; GGUF `glm-dsa`."""

    gguf_name = "glm-dsa"

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.selects = self.indexers(self._types_by_rule())

    def _types_by_rule(self) -> list[str]:
        """Return what `index_topk_pattern`, or else `index_topk_freq` and `index_skip_topk_offset`,
        say of every layer, as transformers understands them; nothing if they are missing.
        """
        config = self.config
        if pattern := config.string("index_topk_pattern", default=""):
            return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        if (period := config.integer("index_topk_freq", default=1)) == 1:
            return []
        first = config.integer("index_skip_topk_offset", minimum=0, default=2) - 1
        return [
            "shared" if max(layer - first, 0) % period else "full" for layer in range(self.n_main)
        ]

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        if self.selects:
            keys["attention.indexer.types"] = array(ValueType.BOOL, self.selects)
        return keys
