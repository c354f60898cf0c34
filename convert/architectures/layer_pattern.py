"""What each layer of a hybrid model is, as configs say it: in a pattern with a character for each
layer, or in a list of names.
"""

from __future__ import annotations

from ...errors import ConfigError, printable
from ..checkpoint.config import Config

MAMBA, ATTENTION, DENSE, EXPERTS = "M", "*", "-", "E"
_NAMES = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": DENSE,
    "moe": EXPERTS,
}


def layer_kinds(config: Config) -> str:
    """Return a character for each layer. Raise ConfigError for an unknown one."""
    names = config.strings("layers_block_type", "layer_types", default=[])
    pattern = config.string("hybrid_override_pattern", default="")
    if not names and not pattern:
        raise ConfigError(
            "neither 'hybrid_override_pattern' nor 'layers_block_type' says what layers are",
            file=config.file,
        )
    # The pattern is read first, as the reference does; the two say the same.
    kinds = pattern or [_NAMES.get(name, name) for name in names]
    for layer, kind in enumerate(kinds):
        if kind not in _NAMES.values():
            raise ConfigError(
                f"layer {layer} is '{printable(kind)}', expected one of"
                f" {', '.join(dict.fromkeys(_NAMES.values()) if pattern else _NAMES)}",
                file=config.file,
            )
    return "".join(kinds)
