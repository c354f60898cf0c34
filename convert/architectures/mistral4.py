"""Mistral 4: latent attention with experts that are stored merged and stay merged.

Queries are scaled by their position (llama_4_scaling_beta). The reference writes no key for that,
so a file without one means 0.1, which all published models have; another value is written as
`attention.temperature_scale`, as for `mistral3`.
"""

from __future__ import annotations

from ...formats.values import Value, f32
from .latent import LatentAttention
from .registry import register

_TEMPERATURE = 0.1  # of a file that does not say


@register("Mistral4ForCausalLM")
@register("Mistral3ForConditionalGeneration", model_type="mistral4")
class Mistral4(LatentAttention):
    """Mistral 4; GGUF `mistral4`."""

    gguf_name = "mistral4"
    always_merged = True

    def family_keys(self) -> dict[str, Value]:
        keys, section = super().family_keys(), self.config.section("rope_parameters")
        scale = _TEMPERATURE
        if section is not None:
            scale = section.number("llama_4_scaling_beta", default=_TEMPERATURE, positive=False)
        if scale != _TEMPERATURE:
            keys["attention.temperature_scale"] = f32(scale)
        return keys
