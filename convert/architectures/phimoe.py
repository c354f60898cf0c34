"""Phi-3.5-MoE: Phi-3's rotation, query, key and value apart, LayerNorms with biases, and two
experts of a token that are weighed each for itself (sparse mixer).
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, f32
from ..metadata.rope import LongRopeConfig
from .blocks import LAYER, attention
from .experts import DOWN, GATE, UP, RoutedExperts
from .implied import check_number
from .phi3 import Phi3
from .registry import register
from .weight import Weight

_USED, _JITTER = 2, 0.01  # what GGUF's phimoe implies


class MagnitudeRopeConfig(LongRopeConfig):
    """PhiMoE's, in which config.json says how long rotated vectors are."""

    def scaling_keys(self) -> dict[str, Value]:
        """Return the keys of Phi-3, with the factor of config.json. Raise ConfigError if that of
        long texts is another one.
        """
        keys = super().scaling_keys()
        if self.kind == "default" or self._section is None:
            return keys
        short, long = (self._section.number(f"{which}_mscale") for which in ("short", "long"))
        if short != long:
            raise ConfigError(
                f"key 'short_mscale' is {short:g} and 'long_mscale' {long:g}; GGUF has one key",
                file=self._config.file,
            )
        return keys | {"rope.scaling.attn_factor": f32(short)}


@register("PhiMoEForCausalLM", "PhimoeForCausalLM")
class PhiMoE(RoutedExperts, Phi3):
    """Phi-3.5-MoE; GGUF `phimoe`."""

    gguf_name = "phimoe"
    expert_stem = f"{LAYER}.block_sparse_moe.experts"
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w2": DOWN, "w3": UP}
    class_defaults: ClassVar[dict[str, object]] = {"num_experts_per_tok": _USED}

    def make_rope(self) -> LongRopeConfig:
        super().make_rope()  # for the number of rotated elements
        return MagnitudeRopeConfig(self.config, self.n_rotated)

    def expert_width(self) -> int:
        return self.n_ff

    def family_keys(self) -> dict[str, Value]:
        check_number(self.config, self.gguf_name, "num_experts_per_tok", _USED)
        check_number(self.config, self.gguf_name, "router_jitter_noise", _JITTER)
        return super().family_keys()

    def weights(self) -> list[Weight]:
        d, config = self.n_embd, self.config
        biased = config.boolean("attention_bias", default=False)
        head = config.boolean("lm_head_bias", default=False)
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.norm", "output_norm", (d,), bias=True),
            Weight("lm_head", "output", (self.n_vocab, d), bias=head, optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), bias=True),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,), bias=True),
            *attention(self, bias=biased, output_bias=biased),
            Weight(f"{LAYER}.block_sparse_moe.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
        ]
