"""EXAONE 4.0: norms after attention and feed-forward instead of before them, and layers with a
sliding window; the others then have no rotation.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .implied import GLOBAL, LOCAL
from .registry import register
from .weight import Weight

_WINDOW, _PERIOD = 4096, 4  # of the class, where config.json has no key


@register("Exaone4ForCausalLM")
class Exaone4(Architecture):
    """EXAONE 4.0; GGUF `exaone4`."""

    gguf_name = "exaone4"
    always_names_head_size = False
    has_window_key = True
    # Texts are split as by GPT-2, or with NFC before as by OLMo.
    pre_names: ClassVar[dict[str, str]] = {"gpt-2": "exaone4", "olmo": "exaone4"}
    class_defaults: ClassVar[dict[str, object]] = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}

    def family_keys(self) -> dict[str, Value]:
        keys: dict[str, Value] = {"vocab_size": u32(self.n_vocab)}
        # Null says that there is no window, in any layer.
        named = "sliding_window" in self.checkpoint.config.of_text().values
        window = self.config.integer("sliding_window", default=None) if named else _WINDOW
        if window is not None:
            keys["attention.sliding_window"] = u32(window)
            keys["attention.sliding_window_pattern"] = array(
                ValueType.BOOL, window_layers(self.config, self.n_layers)
            )
        return keys

    def weights(self) -> list[Weight]:
        d = self.n_embd
        return [
            *embedding_and_head(self),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.post_attention_norm", (d,)),
            Weight(f"{LAYER}.post_feedforward_layernorm", "blk.{}.post_ffw_norm", (d,)),
            *gated_feed_forward(self),
        ]


def window_layers(config: Config, n: int) -> list[bool]:
    """Return which of n layers have the window: those of `layer_types`, or else of
    `sliding_window_pattern`, a period or a letter for each layer of one. Raise ConfigError for
    other values, and for a last layer that would have one by letters: classes differ there.
    """
    if kinds := config.strings("layer_types", default=[]):
        if len(kinds) != n or not {*kinds} <= {LOCAL, GLOBAL}:
            raise ConfigError(
                f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {n} layers",
                file=config.file,
            )
        return [kind == LOCAL for kind in kinds]
    if not isinstance(config.values.get("sliding_window_pattern"), str):
        period = config.integer("sliding_window_pattern", default=_PERIOD)
        return [(layer + 1) % period != 0 for layer in range(n)]
    letters = config.string("sliding_window_pattern")
    if not letters or not {*letters} <= {"L", "G"} or letters[(n - 1) % len(letters)] == "L":
        raise ConfigError(
            f"key 'sliding_window_pattern' is '{printable(letters)}', expected letters L and G"
            f" by which the last of {n} layers has no window; 'layer_types' can say more",
            file=config.file,
        )
    return [letters[layer % len(letters)] == "L" for layer in range(n)]
