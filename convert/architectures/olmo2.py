"""OLMo 2 and 3: norms after attention and feed-forward instead of before, and norms of queries and
keys over all heads. OLMo 3 has a sliding window in most layers, with rotary frequencies that are
not scaled.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, f32, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import PlainRopeConfig, RopeConfig
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .implied import GLOBAL, LOCAL, check_flag
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)

_PERIOD = 4  # of layers that see all positions, by the class and in llama.cpp


def _tell_of(found: bool, what: str) -> None:
    """Log a warning about a file that llama.cpp does not load, or evaluates otherwise, if it is
    one.
    """
    if found:
        log.warning("llama.cpp does not know GGUF's olmo2 with %s", what)


@register("Olmo2ForCausalLM")
class Olmo2(Architecture):
    """OLMo 2; GGUF `olmo2`."""

    gguf_name = "olmo2"
    pre_names: ClassVar[dict[str, str]] = {"glm4": "dbrx"}
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        check_flag(self.config, self.gguf_name, "attention_bias", False)
        # The reference writes such files without a word. No released model is one.
        _tell_of(self.tied, "no output matrix of its own")
        _tell_of(self.n_heads * self.head_size != self.n_embd, "heads of another size")

    def make_rope(self) -> RopeConfig:
        return PlainRopeConfig(self.config, self.head_size)

    def has_window(self) -> bool:
        return False  # the class has none, whatever config.json says

    def weights(self) -> list[Weight]:
        norms = (
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        )
        return [
            *embedding_and_head(self),
            *attention(self, bias=False, output_bias=False, joined_norms=True),
            *(Weight(f"{LAYER}.{hf}", f"blk.{{}}.{gguf}", (self.n_embd,)) for hf, gguf in norms),
            *gated_feed_forward(self),
        ]


@register("Olmo3ForCausalLM")
class Olmo3(Olmo2):
    """OLMo 3; GGUF `olmo2` with a sliding window."""

    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = {
        **Olmo2.class_defaults,
        "rope_theta": 5e5,
        "sliding_window": 4096,
    }

    def make_rope(self) -> RopeConfig:
        return PlainRopeConfig(self.config, self.head_size, GLOBAL)

    def local_layers(self) -> list[bool]:
        """Return whether each layer has the window. Raise ConfigError for other kinds of layers."""
        by_period = [LOCAL if (i + 1) % _PERIOD else GLOBAL for i in range(self.n_layers)]
        kinds = self.config.strings("layer_types", default=by_period)
        other = next((kind for kind in kinds if kind not in (LOCAL, GLOBAL)), None)
        if other is not None or len(kinds) != self.n_layers:
            raise ConfigError(
                f"key 'layer_types' has {len(kinds)} items"
                + (f", one of them '{printable(other)}'" if other is not None else "")
                + f"; expected {self.n_layers} times {LOCAL} or {GLOBAL}",
                file=self.config.file,
            )
        _tell_of(kinds != by_period, f"full attention in other layers than every {_PERIOD}th")
        return [kind == LOCAL for kind in kinds]

    def rope_keys(self) -> dict[str, Value]:
        return super().rope_keys() | {"rope.freq_base_swa": f32(self.local_base())}

    def local_base(self) -> float:
        """Return the base of the rotary frequencies in layers with the window. Raise ConfigError if
        they are scaled.
        """
        found = self.config.section("rope_parameters")
        if found is None or LOCAL not in found:
            return self.rope.base()
        local = PlainRopeConfig(self.config, self.head_size, LOCAL)
        if local.kind != "default":
            raise ConfigError(
                f"rope type '{local.kind}' of {LOCAL}; GGUF's {self.gguf_name} implies default",
                file=self.config.file,
            )
        _tell_of(local.base() != self.rope.base(), "rotary bases of two kinds")
        return local.base()

    def family_keys(self) -> dict[str, Value]:
        stored = self.checkpoint.config.of_text().values
        if stored.get("sliding_window", 0) is None:
            raise ConfigError(
                f"key 'sliding_window' is null; GGUF's {self.gguf_name} has no other way to say"
                " which layers have rotary frequencies that are not scaled",
                file=self.config.file,
            )
        return {
            "attention.sliding_window": u32(self.config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(ValueType.BOOL, self.local_layers()),
        }
