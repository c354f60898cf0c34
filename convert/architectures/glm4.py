"""GLM-4-0414 and GLM-Z1: norms before and after attention and feed-forward, gate and up in one
matrix, and half of each head rotated, in pairs of neighbours.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..metadata.rope import PlainRopeConfig, RopeConfig
from .blocks import LAYER, attention, embedding_and_head
from .glm_tokens import GlmTokens
from .registry import register
from .weight import Weight

_NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}


@register("Glm4ForCausalLM")
class Glm4(GlmTokens):
    """GLM-4-0414 and GLM-Z1, of 9 and 32 B parameters; GGUF `glm4`."""

    gguf_name = "glm4"
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }
    special_tokens: ClassVar[dict[str, str]] = {
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|endoftext|>",
        "eot_token_id": "<|user|>",
        "unknown_token_id": "<|endoftext|>",
    }

    def make_rope(self) -> RopeConfig:
        section = self.config.section("rope_parameters", "rope_scaling")
        if section is not None and "mrope_section" in section:
            raise ConfigError(
                "key 'mrope_section' is there; this class of models has one position per token",
                file=self.config.file,
            )
        return PlainRopeConfig(self.config, self.head_size)

    def family_keys(self) -> dict[str, Value]:
        return {"rope.dimension_count": u32(self.rope.rotated())}

    def weights(self) -> list[Weight]:
        d, ff = self.n_embd, self.n_ff
        biased = self.config.boolean("attention_bias", default=True)
        return [
            *embedding_and_head(self),
            *(Weight(f"{LAYER}.{hf}", f"blk.{{}}.{gguf}", (d,)) for hf, gguf in _NORMS.items()),
            *attention(self, bias=biased, output_bias=False),
            Weight(f"{LAYER}.mlp.gate_up_proj", "blk.{}.ffn_up", (2 * ff, d)),
            Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, ff)),
        ]
