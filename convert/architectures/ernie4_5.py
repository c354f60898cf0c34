"""ERNIE 4.5 without experts: a Llama whose heads are stored as rotary pairs already."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value
from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward, norms
from .implied import check_flag
from .registry import register
from .weight import Weight


@register("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
class Ernie45(Architecture):
    """ERNIE 4.5 without experts; GGUF `ernie4_5`."""

    gguf_name = "ernie4_5"
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }

    def family_keys(self) -> dict[str, Value]:
        # The flag also adds biases after attention and in the feed-forward, which runtimes do not
        # read.
        check_flag(self.config, self.gguf_name, "use_bias", False)
        return super().family_keys()

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False),
            *gated_feed_forward(self),
        ]
