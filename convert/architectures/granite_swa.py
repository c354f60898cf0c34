"""Granite with sliding windows and attention sinks, without and with experts. Some layers may have
no rotation.
"""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from .blocks import LAYER
from .granite import Granite, GraniteMoe
from .implied import GLOBAL, LOCAL
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight

_PERIOD = 4  # of layers with full attention, in configs that do not say


class LayerRopeConfig(RopeConfig):
    """The rotary settings of a model whose `layer_rope_theta` gives each of `n_layers` layers a
    base, or 0 for no rotation; `rotated` says which layers have one. Raise ConfigError for other
    values, and for two bases, for which GGUF has one key.
    """

    def __init__(self, config: Config, head_size: int, n_layers: int):
        super().__init__(config, head_size)
        self.rotated_layers = [True] * n_layers
        self._base: float | None = None
        bases = config.values.get("layer_rope_theta")
        if bases is None:
            return
        if (
            not isinstance(bases, list)
            or len(bases) != n_layers
            or not all(type(base) in (int, float) and base >= 0 for base in bases)
        ):
            raise ConfigError(
                f"key 'layer_rope_theta' must be a list of {n_layers} numbers that are not"
                " negative",
                file=config.file,
            )
        found = sorted({float(base) for base in bases if base})
        if len(found) > 1:
            raise ConfigError(
                "key 'layer_rope_theta' has"
                f" {', '.join(f'{base:g}' for base in found)}; GGUF's granite_swa has one base of"
                " rotations for all layers",
                file=config.file,
            )
        self.rotated_layers = [base != 0 for base in bases]
        self._base = next(iter(found), None)

    def base(self) -> float:
        return super().base() if self._base is None else self._base


class Windows(Granite):
    """What the classes with and without experts share: windows, sinks, rotations by layer."""

    gguf_name = "granite_swa"
    has_window_key = True
    rope: LayerRopeConfig

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.near = self._window_layers()
        self._check_rotated_layers()

    def read_config(self, checkpoint: Checkpoint) -> Config:
        values = checkpoint.config.of_text().values
        # An absent key has a default; null means that no layer has a window.
        if values.get("sliding_window", 0) is None:
            raise ConfigError(
                f"key 'sliding_window' is null; GGUF's {self.gguf_name} implies a window",
                file=checkpoint.config.file,
            )
        return super().read_config(checkpoint)

    def make_rope(self) -> LayerRopeConfig:
        return LayerRopeConfig(self.config, self.head_size, self.n_layers)

    def _window_layers(self) -> list[bool]:
        """Return which layers have the window: those of `layer_types`, or else all but every fourth
        from the first on. Raise ConfigError for other values.
        """
        config, n = self.config, self.n_layers
        if not (kinds := config.strings("layer_types", default=[])):
            return [layer % _PERIOD != 0 for layer in range(n)]
        if len(kinds) != n or not {*kinds} <= {LOCAL, GLOBAL}:
            raise ConfigError(
                f"key 'layer_types' must name {LOCAL} or {GLOBAL} for each of {n} layers",
                file=config.file,
            )
        return [kind == LOCAL for kind in kinds]

    def _check_rotated_layers(self) -> None:
        """Raise ConfigError if `no_rope_layers` (1: rotated), which the converter of llama.cpp
        reads, names other layers than `layer_rope_theta`, which the class reads.
        """
        flags = self.config.integers("no_rope_layers", default=[])
        if flags and [flag != 0 for flag in flags] != self.rope.rotated_layers:
            raise ConfigError(
                "keys 'no_rope_layers' and 'layer_rope_theta' differ in which layers have no"
                " rotation",
                file=self.config.file,
            )

    def family_keys(self) -> dict[str, Value]:
        keys = {
            "attention.sliding_window": u32(self.config.integer("sliding_window")),
            "attention.sliding_window_pattern": array(ValueType.BOOL, self.near),
        }
        if not all(self.rope.rotated_layers):
            keys["attention.rope_pattern"] = array(ValueType.BOOL, self.rope.rotated_layers)
        return super().family_keys() | keys

    def weights(self) -> list[Weight]:
        sinks = Weight(
            f"{LAYER}.self_attn.sinks", "blk.{}.attn_sinks.weight", (self.n_heads,), exact=True
        )
        return [*super().weights(), sinks]


@register("GraniteSWAForCausalLM")
class GraniteSwa(Windows):
    """Granite with windows and sinks; GGUF `granite_swa`."""

    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = Granite.class_defaults | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 4,
        "sliding_window": 128,
    }


@register("GraniteMoeSWAForCausalLM")
class GraniteMoeSwa(Windows, GraniteMoe):
    """The same with experts. Gate and up of experts are one tensor, as are those of the shared one;
    GGUF `granite_swa`.
    """

    always_merged = True
    router = "router"
    joins_shared = True
    class_defaults: ClassVar[dict[str, object]] = Granite.class_defaults | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    }

    def text_name(self, name: str) -> str | None:
        # As in checkpoints of Granite with experts that are older than these classes.
        found = super().text_name(name)
        return found and found.replace(".router.layer.", ".router.")
