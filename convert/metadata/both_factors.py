"""Rotary settings of models whose rotation may have two sets of frequency factors, in keys that are
otherwise the usual ones.
"""

from __future__ import annotations

import numpy as np

from ...errors import ConfigError
from ...formats.values import Value, string
from .rope import LongRopeConfig, RopeConfig

_BOTH = ("longrope", "su")


class BothFactorsRopeConfig(LongRopeConfig):
    """MiniCPM's: long factors are for texts beyond the context, unless config.json names an
    original one.
    """

    kinds = ("default", "linear", *_BOTH)

    def original_context(self) -> int:
        """Return the context in tokens that short factors are for."""
        for config in (self._section, self._config):
            if config is not None and "original_max_position_embeddings" in config:
                return config.integer("original_max_position_embeddings")
        return self.context()

    def both_factors(self) -> dict[str, np.ndarray]:
        return super().both_factors() if self.kind in _BOTH else {}

    def scaling_keys(self) -> dict[str, Value]:
        """Return `rope.scaling.*`: of two sets of factors the kind, and where the original context
        is not the whole one, its length and the attention factor. Raise ConfigError for another
        factor than that of the two lengths.
        """
        if self.kind not in _BOTH:
            return RopeConfig.scaling_keys(self)
        both = super().scaling_keys()
        implied = both["rope.scaling.attn_factor"].data
        if self._section is not None and "attention_factor" in self._section:
            found = self._section.number("attention_factor")
            if abs(found - implied) > 1e-6 * implied:
                raise ConfigError(
                    f"key 'attention_factor' is {found:g}; contexts of {self.original_context()}"
                    f" and {self.context()} imply {implied:g}",
                    file=self._config.file,
                )
        kind = {"rope.scaling.type": string("longrope")}
        return kind | (both if self.original_context() != self.context() else {})
