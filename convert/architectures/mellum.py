"""Mellum 2: Qwen3's layers with experts, most of them with a window, and two rotations."""

from __future__ import annotations

import logging
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..metadata.layer_rope import LayerTypesRopeConfig
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import GLOBAL, LOCAL, check_flag
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)


@register("MellumForCausalLM")
class Mellum(RoutedExperts):
    """Mellum 2; GGUF `mellum`."""

    gguf_name = "mellum"
    has_window_key = True
    renormalizes = True
    pre_names: ClassVar[dict[str, str]] = {"starcoder": "mellum2"}
    rope: LayerTypesRopeConfig
    class_defaults: ClassVar[dict[str, object]] = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {GLOBAL: {"rope_theta": 500000.0}, LOCAL: {"rope_theta": 10000.0}},
        "sliding_window": 1024,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.near = self._layers("layer_types", [GLOBAL, LOCAL])
        self._layers("mlp_layer_types", ["sparse"])
        check_flag(config, name, "attention_bias", False)
        if any(self.near):
            check_flag(config, name, "use_sliding_window", True)
        if self.rope.rotated() != self.head_size or self.rope.near_rotated() != self.head_size:
            raise ConfigError(
                f"key 'partial_rotary_factor' is not 1; GGUF's {name} rotates whole heads",
                file=config.file,
            )
        if self.tied:
            log.warning("llama.cpp refuses GGUF's %s with no output matrix of its own", name)

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config, values = super().read_config(checkpoint), checkpoint.config.of_text().values
        # An absent key has a default; null means that no layer has a window.
        if values.get("sliding_window", 0) is None and LOCAL in config.strings(
            "layer_types", default=[]
        ):
            raise ConfigError(
                f"key 'sliding_window' is null, and 'layer_types' has {LOCAL}",
                file=checkpoint.config.file,
            )
        return config

    def make_rope(self) -> LayerTypesRopeConfig:
        return LayerTypesRopeConfig(self.config, self.head_size)

    def _layers(self, key: str, kinds: list[str]) -> list[bool]:
        """Return which layers are of the last of `kinds`; by default all are of the first. Raise
        ConfigError for others.
        """
        config, n = self.config, self.n_layers
        found = config.strings(key, default=[kinds[0]] * n)
        if len(found) != n or not {*found} <= {*kinds}:
            raise ConfigError(
                f"key '{key}' must name {' or '.join(kinds)} for each of {n} layers",
                file=config.file,
            )
        return [kind == kinds[-1] for kind in found]

    def rope_keys(self) -> dict[str, Value]:
        return super().rope_keys() | self.rope.near_base_key()

    def family_keys(self) -> dict[str, Value]:
        keys = {"expert_feed_forward_length": u32(self.n_ff_expert)}
        if self.checkpoint.config.of_text().values.get("sliding_window", 0) is not None:
            keys["attention.sliding_window"] = u32(self.config.integer("sliding_window"))
            keys["attention.sliding_window_pattern"] = array(ValueType.BOOL, self.near)
        return keys

    def text_name(self, name: str) -> str | None:
        # A block that predicts further tokens, for which GGUF has no tensors.
        return None if name.startswith("mtp.") else super().text_name(name)

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, head_norms=True),
            Weight(f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, self.n_embd)),
        ]
