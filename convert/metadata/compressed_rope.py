"""Rotary settings of models that compress keys along the sequence."""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value
from ..checkpoint.config import Config
from .rope import RopeConfig, share_of_head


class CompressedRope(RopeConfig):
    """Two rotations: that of layers with a window only, which is never scaled, and that of all
    others, which has a base of its own and may be scaled by YaRN. transformers calls them `main`
    and `compress`.
    """

    kinds = ("default", "yarn")

    def __init__(self, config: Config, head_size: int):
        super().__init__(config, head_size, layers="compress")
        both = config.section("rope_parameters")
        self._main = None if both is None else both.section("main")
        section = self._section
        factor = 1.0 if section is None else section.number("attention_factor", default=1.0)
        if self.kind == "yarn" and factor != 1:
            raise ConfigError(
                f"key 'attention_factor' is {factor:g}; GGUF's deepseek4 implies 1",
                file=config.file,
            )

    def base(self) -> float:
        """Return the base of layers with a window only."""
        section = self._config if self._main is None else self._main
        return section.number("rope_theta", default=10000.0)

    def compressed_base(self) -> float:
        """Return the base of layers that compress. Raise ConfigError if the config lacks it."""
        if self._main is not None and self._section is not None:
            return self._section.number("rope_theta")
        return self._config.number("compress_rope_theta")

    def scaling_keys(self) -> dict[str, Value]:
        keys = super().scaling_keys()
        keys.pop("rope.scaling.yarn_attn_factor", None)  # 1, which runtimes imply
        return keys

    def rotated(self) -> int:
        """Return how many elements of a head are rotated, the last ones."""
        if "qk_rope_head_dim" in self._config:
            rotated = self._config.integer("qk_rope_head_dim", maximum=self._head_size)
            if rotated < 2 or rotated % 2:
                raise ConfigError(
                    f"key 'qk_rope_head_dim' is {rotated}, expected an even number of at least 2",
                    file=self._config.file,
                )
            return rotated
        return share_of_head(self._section or self._config, self._head_size)
