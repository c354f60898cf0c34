"""Builders of Kimi delta attention from the tensors of a block."""

from __future__ import annotations

import torch

from ..layers.absent import AbsentMixer
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.specs import KimiDeltaSpec
from .decoder import Decoder


def kimi_delta(d: Decoder, layer: int) -> KimiDelta | AbsentMixer:
    """`attn_q`, `attn_k`, `attn_v`, `attn_output` and what is `ssm_*` in a block, or nothing where
    this rank has no part of it.
    """
    at, w, p = f"blk.{layer}", d.w, d.p
    taps = p.integer("ssm.conv_kernel", least=2, most=64)
    spec = KimiDeltaSpec(d.heads[layer], p.integer("kda.head_dim"), taps)
    local = spec if w.share is None else w.share.kimi_delta(layer, spec)
    if local is None:
        return AbsentMixer()
    inner, n = spec.inner, spec.length

    def product(name: str, n_in: int, n_out: int, split: str = "column"):
        return w.linear(f"{at}.{name}", n_in, n_out, role=name, split=split)

    def two(part: str):
        first = product(f"ssm_{part}_a", d.width, n, "replicated")
        return first, product(f"ssm_{part}_b", n, inner)

    q, k, v = (product(f"attn_{x}", d.width, inner) for x in "qkv")
    taps_of = (w.values(f"{at}.ssm_conv1d_{x}.weight", (inner, 1, taps)) for x in "qkv")
    return KimiDelta(
        local,
        qkv=(q, k, v),
        decay=two("f"),
        gate=two("g"),
        beta=product("ssm_beta", d.width, spec.heads),
        convolution=torch.cat(list(taps_of)).flatten(1),
        dt=w.vector(f"{at}.ssm_dt.bias", inner),
        a=w.values(f"{at}.ssm_a", (spec.heads, 1)).flatten(),
        norm=d.rms_norm(f"{at}.ssm_norm", n),
        output=product("attn_output", inner, d.width, "row"),
    )
