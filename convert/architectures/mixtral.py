"""Mixtral: Llama's attention, routed experts in every layer; GGUF calls it `llama` too."""

from __future__ import annotations

from typing import ClassVar

from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import DOWN, GATE, UP, RoutedExperts
from .llama import Llama
from .registry import register
from .weight import Weight


@register("MixtralForCausalLM")
class Mixtral(RoutedExperts, Llama):
    """Mixtral; GGUF `llama` with experts."""

    always_names_head_size = False
    expert_stem = f"{LAYER}.block_sparse_moe.experts"
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w2": DOWN, "w3": UP}

    def expert_width(self) -> int:
        return self.n_ff

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, rotary_pairs=True),
            Weight(
                f"{LAYER}.block_sparse_moe.gate",
                "blk.{}.ffn_gate_inp",
                (self.n_experts, self.n_embd),
            ),
        ]
