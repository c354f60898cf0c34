"""Mistral 4: latent attention with experts that are stored merged and stay merged.

The position-dependent scale of queries (llama_4_scaling_beta) has no key in this architecture.
Files are as the reference writes them.
"""

from __future__ import annotations

from .latent import LatentAttention
from .registry import register


@register("Mistral4ForCausalLM")
@register("Mistral3ForConditionalGeneration", model_type="mistral4")
class Mistral4(LatentAttention):
    gguf_name = "mistral4"
    always_merged = True
