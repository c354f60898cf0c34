"""Tensors and keys of several residual streams (hyper-connections)."""

from __future__ import annotations

from ...formats.values import Value, f32, u32
from ..checkpoint.config import Config
from .weight import Weight


def stream_keys(config: Config) -> dict[str, Value]:
    """Return the keys of the streams. ConfigError, with file and key, for numbers that are not
    possible.
    """
    return {
        "hyper_connection.count": u32(config.integer("hc_mult")),
        "hyper_connection.sinkhorn_iterations": u32(config.integer("hc_sinkhorn_iters")),
        "hyper_connection.epsilon": f32(config.number("hc_eps")),
    }


def stream_weights(layer: str, n: int, width: int, n_layers: int) -> list[Weight]:
    """Return what is around the layers of each block. layer: where those of a block are stored.
    n_layers: so many blocks have several streams; blocks after them have none.
    """
    mixed = (2 + n) * n
    return [
        Weight(
            f"{layer}.hc_{half}_{part}",
            f"blk.{{}}.hc_{half}_{part}.weight",
            lambda number, shape=shape: shape if number < n_layers else None,
            exact=True,
        )
        for half in ("attn", "ffn")
        for part, shape in (("fn", (mixed, n * width)), ("base", (mixed,)), ("scale", (3,)))
    ]
