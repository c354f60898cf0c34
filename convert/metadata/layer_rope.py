"""Rotary settings of models whose `rope_parameters` has a section for each kind of layers."""

from __future__ import annotations

from ...errors import ConfigError, printable
from ...formats.values import Value, f32, u32
from ..checkpoint.config import Config
from .rope import PlainRopeConfig, share_of_head

_FULL, _NEAR = "full_attention", "sliding_attention"


class LayerTypesRopeConfig(PlainRopeConfig):
    """The rotation of layers that see all positions, which may be scaled; that of layers with a
    window has its own base and share of a head, and no scaling. Raise ConfigError for a config
    that lacks the former, and for scaling of the latter or of another kind than GGUF has keys for.
    """

    def __init__(self, config: Config, head_size: int):
        sections = config.section("rope_parameters")
        full = None if sections is None else sections.section(_FULL)
        if sections is None or full is None:
            raise ConfigError(f"key 'rope_parameters' has no '{_FULL}'", file=config.file)
        super().__init__(config, head_size, _FULL)
        self._sizes = {_FULL: self._rotated_of(full)}
        self._near = sections.section(_NEAR)
        if self.kind == "yarn" and not full.boolean("truncate", default=True):
            raise ConfigError(
                f"key 'rope_parameters.{_FULL}.truncate' is false; GGUF has no key for it",
                file=config.file,
            )
        if self._near is None:
            return
        kind = self._near.string("rope_type", "type", default="default")
        if kind != "default":
            raise ConfigError(
                f"key 'rope_parameters.{_NEAR}.rope_type' is '{printable(kind)}'; runtimes do not"
                " scale the rotation of layers with a window",
                file=config.file,
            )
        self._sizes[_NEAR] = self._rotated_of(self._near)

    def _rotated_of(self, section: Config) -> int:
        if "partial_rotary_factor" not in section:
            return self._head_size
        return share_of_head(section, self._head_size)

    def rotated(self) -> int:
        return self._sizes[_FULL]

    def near_rotated(self) -> int:
        """Return how many elements of a head are rotated in layers with a window."""
        return self._sizes.get(_NEAR, self._head_size)

    @property
    def near_base(self) -> float | None:
        """The base of the rotation in layers with a window; None if the config has none."""
        return None if self._near is None else self._near.number("rope_theta", default=None)

    def layer_keys(self) -> dict[str, Value]:
        """Return how much of a head is rotated in either kind of layers, and the base of those with
        a window.
        """
        keys = {"rope.dimension_count": u32(self._sizes[_FULL])}
        if self._near is not None:
            keys["rope.dimension_count_swa"] = u32(self._sizes[_NEAR])
        return keys | self.near_base_key()

    def near_base_key(self) -> dict[str, Value]:
        """Return the key of the base in layers with a window, if the config has one."""
        base = self.near_base
        return {} if base is None else {"rope.freq_base_swa": f32(base)}
