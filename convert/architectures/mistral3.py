"""Ministral 3, and the text models of Mistral's multimodal checkpoints: Llama's tensors with YaRN
and a temperature that depends on the position.
"""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value, f32
from .implied import check_number
from .llama import Llama
from .registry import register


@register("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
class Mistral3(Llama):
    """Ministral 3 and text models of Mistral's multimodal checkpoints; GGUF `mistral3`."""

    gguf_name = "mistral3"

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        # Older text models, such as that of Mistral Small 3.1.
        if self.config.string("model_type") != "ministral3":
            return keys
        section = self.config.section("rope_parameters", "rope_scaling")
        if section is None or self.rope.kind != "yarn":
            raise ConfigError(
                f"rope type '{self.rope.kind}' is not what ministral3 has, which is yarn",
                file=self.config.file,
            )
        scale = section.number("mscale_all_dim", positive=False)
        check_number(section, self.gguf_name, "mscale", scale)  # the rotation is not scaled
        return keys | {
            "rope.scaling.yarn_log_multiplier": f32(scale),
            "attention.temperature_scale": f32(
                section.number("llama_4_scaling_beta", positive=False)
            ),
        }
