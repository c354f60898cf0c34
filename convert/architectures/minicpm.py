"""MiniCPM, MiniCPM4 and MiniCPM3: Llama with factors of embeddings, of what layers add, and of
logits; in MiniCPM3 latent attention, without experts. Long contexts may have two sets of rotary
factors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import ClassVar

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.both_factors import BothFactorsRopeConfig
from ..tensors.rows import GeneratedRow
from .base import Architecture
from .blocks import LAYER, embedding_and_head, gated_feed_forward, norms
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .llama import Llama
from .registry import register
from .weight import ConvertedTensor, Weight

log = logging.getLogger(__name__)

_EMBEDDED, _DEPTH, _BASE_WIDTH = 12.0, 1.4, 256.0  # what GGUF's minicpm3 implies


class BothFactors(Architecture):
    """Rotations that may have two sets of frequency factors."""

    rope: BothFactorsRopeConfig

    def make_rope(self) -> BothFactorsRopeConfig:
        return BothFactorsRopeConfig(self.config, self.head_size)

    def generated(self) -> Iterator[ConvertedTensor]:
        for which, factors in self.rope.both_factors().items():
            yield ConvertedTensor(
                TensorInfo(f"rope_factors_{which}.weight", factors.shape, TYPES["F32"]),
                GeneratedRow(factors),
            )


@register("MiniCPMForCausalLM")
class MiniCPM(BothFactors, Llama):
    """MiniCPM 1B and 2B, MiniCPM4 and 4.1; GGUF `minicpm`."""

    gguf_name = "minicpm"
    tied_by_default = True
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-6}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_number(self.config, self.gguf_name, "num_experts", 0)  # MiniCPM-MoE has more
        sparse = self.config.section("sparse_config")
        if sparse is not None:
            length = sparse.integer("dense_len", default=8192)
            log.warning(
                "the model has sparse attention in texts of more than %d tokens, and GGUF's %s has"
                " not: they are evaluated with full attention",
                length,
                self.gguf_name,
            )

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        return {
            "embedding_scale": f32(config.number("scale_emb")),
            "residual_scale": f32(config.number("scale_depth") / math.sqrt(self.n_layers)),
            "logit_scale": f32(self.n_embd / config.number("dim_model_base")),
        }


@register("MiniCPM3ForCausalLM")
class MiniCPM3(BothFactors):
    """MiniCPM3-4B; GGUF `minicpm3`, which has no keys for its factors."""

    gguf_name = "minicpm3"
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {
        "rms_norm_eps": 1e-5,
        "scale_emb": _EMBEDDED,
        "scale_depth": _DEPTH,
        "dim_model_base": _BASE_WIDTH,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        stored = checkpoint.config.of_text().values
        for key in ("q_lora_rank", "scale_depth", "dim_model_base"):
            if key in stored and stored[key] is None:  # no latent vectors, or no factor
                raise ConfigError(
                    f"key '{key}' is null; GGUF's minicpm3 implies a number", file=config.file
                )
        self.q_rank, self.kv_rank = config.integer("q_lora_rank"), config.integer("kv_lora_rank")
        self.n_nope = config.integer("qk_nope_head_dim")
        self.n_rot = config.integer("qk_rope_head_dim")
        usual = self.n_embd // self.n_heads
        self.n_value = config.integer("v_head_dim", default=usual)
        for flag in ("attention_bias", "mlp_bias"):
            check_flag(config, self.gguf_name, flag, False)
        for key, implied in (
            ("scale_emb", _EMBEDDED),
            ("scale_depth", _DEPTH),
            ("dim_model_base", _BASE_WIDTH),
            ("num_key_value_heads", self.n_heads),
        ):
            check_number(config, self.gguf_name, key, implied)
        self._usual_value = usual

    def _derived_head_size(self) -> int:
        return self.config.integer("qk_rope_head_dim")

    def make_rope(self) -> BothFactorsRopeConfig:
        return BothFactorsRopeConfig(self.config, self.config.integer("qk_rope_head_dim"))

    def rope_keys(self) -> dict[str, Value]:
        """Return the keys of a rotation that is not the usual one: llama.cpp's converter writes
        none.
        """
        keys = super().rope_keys()
        if self.rope.base() == 10000.0:
            del keys["rope.freq_base"]
        if "rope.scaling.original_context_length" not in keys:
            keys.pop("rope.scaling.type", None)  # the factors imply it
        return keys

    def head_size_keys(self) -> dict[str, Value]:
        keys = {"attention.key_length": u32(self.n_nope + self.n_rot)}
        if self.n_value != self._usual_value:
            keys["attention.value_length"] = u32(self.n_value)
        return keys

    def family_keys(self) -> dict[str, Value]:
        return {
            "vocab_size": u32(self.n_vocab),
            "attention.q_lora_rank": u32(self.q_rank),
            "attention.kv_lora_rank": u32(self.kv_rank),
            "rope.dimension_count": u32(self.n_rot),
        }

    def weights(self) -> list[Weight]:
        d, heads, attn = self.n_embd, self.n_heads, f"{LAYER}.self_attn"
        q, kv = heads * (self.n_nope + self.n_rot), heads * (self.n_nope + self.n_value)
        both = self.kv_rank + self.n_rot
        return [
            *embedding_and_head(self),
            *norms(self),
            Weight(f"{attn}.q_a_proj", "blk.{}.attn_q_a", (self.q_rank, d)),
            Weight(f"{attn}.q_a_layernorm", "blk.{}.attn_q_a_norm", (self.q_rank,)),
            Weight(f"{attn}.q_b_proj", "blk.{}.attn_q_b", (q, self.q_rank)),
            Weight(f"{attn}.kv_a_proj_with_mqa", "blk.{}.attn_kv_a_mqa", (both, d)),
            Weight(f"{attn}.kv_a_layernorm", "blk.{}.attn_kv_a_norm", (self.kv_rank,)),
            Weight(f"{attn}.kv_b_proj", "blk.{}.attn_kv_b", (kv, self.kv_rank)),
            Weight(f"{attn}.o_proj", "blk.{}.attn_output", (d, heads * self.n_value)),
            *gated_feed_forward(self),
        ]
