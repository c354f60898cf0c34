"""Builders of Kimi delta attention from the tensors of a block."""

from __future__ import annotations

import torch

from ...errors import ConfigError
from ..layers.absent import AbsentMixer
from ..layers.recurrent.kimi_delta import KimiDelta
from ..layers.specs import KimiDeltaSpec
from .decoder import Decoder


def kimi_delta(d: Decoder, layer: int, *, rate_columns: bool = True) -> KimiDelta | AbsentMixer:
    """`attn_q`, `attn_k`, `attn_v`, `attn_output` and what is `ssm_*` in a block, or nothing where
    this rank has no part of it. rate_columns: `ssm_a` has a column, and is no vector. Raise
    ConfigError for keys that are not possible.
    """
    at, w, p = f"blk.{layer}", d.w, d.p
    taps = p.integer("ssm.conv_kernel", least=2, most=64)
    bound = _bound(d)
    spec = KimiDeltaSpec(d.heads[layer], p.integer("kda.head_dim"), taps, bound)
    local = spec if w.share is None else w.share.kimi_delta(layer, spec)
    if local is None:
        return AbsentMixer()
    inner, n = spec.inner, spec.length

    def product(name: str, n_in: int, n_out: int, split: str = "column"):
        return w.linear(f"{at}.{name}", n_in, n_out, role=name, split=split)

    def one_or_two(part: str):
        if not w.has(f"{at}.ssm_{part}_b.weight"):
            return (product(f"ssm_{part}_a", d.width, inner),)
        first = product(f"ssm_{part}_a", d.width, n, "replicated")
        return first, product(f"ssm_{part}_b", n, inner)

    q, k, v = (product(f"attn_{x}", d.width, inner) for x in "qkv")
    taps_of = (w.values(f"{at}.ssm_conv1d_{x}.weight", (inner, 1, taps)) for x in "qkv")
    a = w.values(f"{at}.ssm_a", (spec.heads, 1) if rate_columns else (spec.heads,)).flatten()
    return KimiDelta(
        local,
        qkv=(q, k, v),
        decay=one_or_two("f"),
        gate=one_or_two("g"),
        beta=product("ssm_beta", d.width, spec.heads),
        convolution=torch.cat(list(taps_of)).flatten(1),
        dt=w.vector(f"{at}.ssm_dt.bias", inner),
        a=a.abs() if bound else a,  # files have it with either sign
        norm=d.rms_norm(f"{at}.ssm_norm", n),
        output=product("attn_output", inner, d.width, "row"),
    )


def _bound(d: Decoder) -> float:
    """Return the lower bound of the logarithms of decays; 0 if there is none."""
    p, key = d.p, "kda.gate_lower_bound"
    if not p.has(key) or not p.flag("kda.safe_gate", True):
        return 0.0
    (bound,) = p.numbers(key, 1, least=None)
    if not bound < 0:
        raise ConfigError(
            f"metadata key '{d.p.architecture}.{key}' is {bound:g}, expected a number below 0",
            file=p.file,
        )
    return bound
