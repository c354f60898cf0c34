"""Builders of gated short convolutions from the tensors of a block."""

from __future__ import annotations

from ..layers.absent import AbsentMixer
from ..layers.recurrent.short_conv import ShortConv
from ..layers.specs import ShortConvSpec
from .decoder import Decoder


def short_conv(d: Decoder, layer: int) -> ShortConv | AbsentMixer:
    """`shortconv.in_proj`, `shortconv.conv` and `shortconv.out_proj` of a block. Raise ConfigError
    for a number of taps that is missing or not possible.
    """
    at, w, p = f"blk.{layer}.shortconv", d.w, d.p
    spec = ShortConvSpec(d.width, p.integer("shortconv.l_cache", most=64))
    local = spec if w.share is None else w.share.short_conv(layer, spec)
    if local is None:
        return AbsentMixer()
    role = "shortconv.{}_proj"
    return ShortConv(
        local,
        inputs=w.linear(
            f"{at}.in_proj", d.width, 3 * d.width, role=role.format("in"), split="column"
        ),
        convolution=w.values(f"{at}.conv.weight", (spec.channels, spec.taps)),
        name=f"{at}.conv.weight",
        output=w.linear(f"{at}.out_proj", d.width, d.width, role=role.format("out"), split="row"),
    )
