"""What GGUF's form of a model implies, because there is no key for it. A checkpoint that differs
would be evaluated wrongly: it is refused, or announced where only long texts differ.
"""

from __future__ import annotations

import logging

from ...errors import ConfigError, printable
from ..checkpoint.config import Config

log = logging.getLogger(__name__)

SILU = ("silu", "swish")
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # different ways to compute the same
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def check_name(config: Config, name: str, key: str, implied: tuple[str, ...]) -> None:
    """Raise ConfigError if `key` is there and names something else, such as another activation of
    the feed-forward.
    """
    found = config.string(key, default=implied[0])
    if found not in implied:
        raise ConfigError(
            f"key '{key}' is '{printable(found)}'; GGUF's {name} implies {implied[0]}",
            file=config.file,
        )


def check_flag(config: Config, name: str, key: str, implied: bool) -> None:
    """Raise ConfigError if the flag `key` is there and has the other value."""
    if config.boolean(key, default=implied) != implied:
        raise ConfigError(
            f"key '{key}' is {str(not implied).lower()}; GGUF's {name} implies"
            f" {str(implied).lower()}",
            file=config.file,
        )


def check_number(config: Config, name: str, key: str, implied: float) -> None:
    """Raise ConfigError if the number `key` is there and another one."""
    if (found := config.number(key, default=implied, positive=False)) != implied:
        raise ConfigError(
            f"key '{key}' is {found:g}; GGUF's {name} implies {implied:g}", file=config.file
        )


def announce_window(config: Config, name: str) -> None:
    """Log a warning if layers have a sliding window that shortens texts, of which GGUF's form
    knows nothing.
    """
    window = config.integer("sliding_window", minimum=0, default=None)
    if window and window < config.integer("max_position_embeddings"):
        log.warning(
            "the model has a sliding window of %d tokens and GGUF's %s has none: texts that are"
            " longer are evaluated with full attention",
            window,
            name,
        )


def global_period(config: Config, n_layers: int, default: int) -> int:
    """Return p, where every p-th layer has full attention and the others a sliding window, from
    `layer_types` or `sliding_window_pattern`. Raise ConfigError for another order of layers.
    """
    kinds = config.strings("layer_types", default=[])
    if not kinds:
        return config.integer("sliding_window_pattern", "_sliding_window_pattern", default=default)
    period = kinds.index(GLOBAL) + 1 if GLOBAL in kinds else max(default, n_layers + 1)
    expected = [GLOBAL if (layer + 1) % period == 0 else LOCAL for layer in range(n_layers)]
    if kinds != expected:
        raise ConfigError(
            f"key 'layer_types' has {GLOBAL} in layers that are not those of a fixed period;"
            " GGUF's form of this model needs one",
            file=config.file,
        )
    # All layers of a model that ends before the first global one are local for either period.
    return default if GLOBAL not in kinds and n_layers < default else period


def check_alternating(config: Config, n_layers: int) -> None:
    """Raise ConfigError unless every other layer has a sliding window, the first one too."""
    kinds = config.strings("layer_types", default=[])
    if kinds and kinds != [LOCAL if layer % 2 == 0 else GLOBAL for layer in range(n_layers)]:
        raise ConfigError(
            f"key 'layer_types' does not alternate from {LOCAL} on; GGUF's form of this model does",
            file=config.file,
        )
