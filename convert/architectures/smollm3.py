"""SmolLM3: a Llama in which every fourth layer has no rotation."""

from __future__ import annotations

from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value
from .implied import check_flag
from .llama import Llama
from .registry import register

_PERIOD = 4  # of layers without rotation; runtimes know it, so GGUF has no key for it


@register("SmolLM3ForCausalLM")
class SmolLM3(Llama):
    """SmolLM3; GGUF `smollm3`."""

    gguf_name = "smollm3"
    tied_by_default = True
    window_by_default = False
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"num_key_value_heads": 4, "rope_theta": 2e6}

    def family_keys(self) -> dict[str, Value]:
        self._check_rotated_layers()
        for key in ("attention_bias", "mlp_bias"):
            check_flag(self.config, self.gguf_name, key, False)
        return super().family_keys()

    def _check_rotated_layers(self) -> None:
        layers = range(self.n_layers)
        period = self.config.integer("no_rope_layer_interval", default=_PERIOD)
        by_period = [int((layer + 1) % period != 0) for layer in layers]
        rotated = self.config.integers("no_rope_layers", default=by_period)
        if rotated[: self.n_layers] != [int((layer + 1) % _PERIOD != 0) for layer in layers]:
            key = "no_rope_layers" if "no_rope_layers" in self.config else "no_rope_layer_interval"
            raise ConfigError(
                f"key '{key}' names other layers without rotation than every {_PERIOD}th, which"
                f" GGUF's {self.gguf_name} implies",
                file=self.config.file,
            )
