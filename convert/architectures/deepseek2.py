"""DeepSeek V2, V2-Lite, V3, R1, Kimi K2 and K2.5, GLM-4.7-Flash. MTP blocks are dropped: GGUF's
deepseek2 has no tensors for them.
"""

from __future__ import annotations

import logging

from ...formats.values import Value
from ..checkpoint.folder import Checkpoint
from .glm_tokens import GlmTokens
from .latent import LatentAttention
from .layout_options import MLA_LAYOUTS, LayoutOptions
from .registry import register
from .weight import split_numbers

log = logging.getLogger(__name__)

# Keys under rope.scaling.
_YARN_IN_IK = (
    "type",
    "factor",
    "original_context_length",
    "yarn_log_multiplier",
)


class DeepseekModel(LatentAttention):
    """The common part of the versions: latent attention in either layout, without the blocks after
    `num_hidden_layers`.
    """

    gguf_name = "deepseek2"
    mla_layouts = MLA_LAYOUTS

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self._n_mtp = self.config.integer("num_nextn_predict_layers", minimum=0, default=0)

    def text_name(self, name: str) -> str | None:
        text = super().text_name(name)
        pattern, numbers = split_numbers(text or "")
        further = (
            pattern.startswith("model.layers.{}.")
            and self.n_layers <= numbers[0] < self.n_layers + self._n_mtp
        )
        return None if further else text

    def metadata(self) -> dict[str, Value]:
        keys = super().metadata()
        if self.options.mla_layout != "ik":
            return keys
        if (groups := self.config.integer("n_group", default=1)) > 1:
            log.warning(
                "the model has %d groups of experts, and ik_llama.cpp's layout no key for them:"
                " it chooses experts from all groups",
                groups,
            )
        scaling = f"{self.gguf_name}.rope.scaling."
        kept = _YARN_IN_IK if f"{scaling}yarn_log_multiplier" in keys else ()
        return {
            key: value
            for key, value in keys.items()
            if not key.startswith(scaling) or key.removeprefix(scaling) in kept
        }


@register("DeepseekV2ForCausalLM")
class DeepseekV2(DeepseekModel):
    """V2 and V2-Lite: the router takes a softmax over the experts."""

    default_scoring = "softmax"


@register(
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",  # the name in published checkpoints
    "Kimi_K25ForConditionalGeneration",  # the name in transformers
)
class DeepseekV3(DeepseekModel):
    """V3, R1, Kimi K2, and the text model of Kimi K2.5: the router takes sigmoids, and its bias
    only affects which experts are chosen.
    """

    default_scoring = "sigmoid"
    has_selection_bias = True


@register("Glm4MoeLiteForCausalLM")
class Glm4MoeLite(GlmTokens, DeepseekV3):
    """GLM-4.7-Flash: V3 with the tokens of GLM."""
