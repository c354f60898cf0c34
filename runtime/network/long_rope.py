"""Rotations with two sets of frequency factors: for texts within a context, and for longer ones.

As in llama.cpp, the size of the context decides between them, not the number of tokens so far, so
that keys in the cache stay right.
"""

from __future__ import annotations

from ..layers.rope import Rope, Scaling
from .decoder import Decoder


def long_rope(d: Decoder, style: str) -> Rope:
    """Return the rotation of the whole file, in which `rope.scaling.attn_factor` is a factor of
    both. style: that of `Rope`. ConfigError for a number of rotated elements that heads have not.
    """
    p = d.p
    n_rot = p.integer("rope.dimension_count", d.key_length, most=d.key_length)
    scaling = Scaling("none", magnitude=p.number("rope.scaling.attn_factor", 1.0, above=0))
    short, long = (
        d.rope(
            style,
            n_rot=n_rot,
            factors=d.w.vector(f"rope_factors_{which}.weight", n_rot // 2),
            scaling=scaling,
        )
        for which in ("short", "long")
    )
    whole = p.integer("context_length")
    short.long = p.integer("rope.scaling.original_context_length", whole), long
    return short


def any_rope(d: Decoder, style: str) -> Rope:
    """Return the rotation with two sets of factors if the file has them, else the usual one."""
    return long_rope(d, style) if d.w.has("rope_factors_long.weight") else d.rope(style)
