"""MiniCPM, of which transformers has no class: Granite with factors that its config says in other
keys. Tensors have the names of published checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import GraniteConfig, GraniteForCausalLM


class MiniCPMConfig(GraniteConfig):
    """The keys of a published config.json."""

    model_type = "minicpm"
    scale_emb: float = 1.0
    scale_depth: float = 1.0
    dim_model_base: int = 1

    def __post_init__(self, **keys: Any):
        head = self.hidden_size // self.num_attention_heads
        self.attention_multiplier = head**-0.5
        self.embedding_multiplier = self.scale_emb
        self.residual_multiplier = self.scale_depth / math.sqrt(self.num_hidden_layers)
        self.logits_scaling = self.hidden_size / self.dim_model_base
        super().__post_init__(**keys)


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Logits of a model with these factors."""

    config_class = MiniCPMConfig
