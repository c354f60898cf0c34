"""Builders of gated delta nets from the tensors of a block, and which blocks have one."""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.absent import AbsentMixer
from ..layers.recurrent.delta_net import DeltaNet
from ..layers.specs import DeltaNetSpec
from .decoder import Decoder


def recurrent_layers(d: Decoder) -> tuple[bool, ...]:
    """Return whether each layer is a delta net: all but every `full_attention_interval`th one,
    unless `attention.recurrent_layers` lists them.
    """
    p, interval = d.p, d.p.integer("full_attention_interval", 4)
    default = tuple((layer + 1) % interval != 0 for layer in range(d.n_layers))
    n_blocks = p.integer("block_count")
    return p.flags("attention.recurrent_layers", d.n_layers, default, n_blocks=n_blocks)


def delta_net(d: Decoder, layer: int, *, sigmoid: bool = False) -> DeltaNet | AbsentMixer:
    """`attn_qkv` and `attn_gate` (or `ssm_in`), `ssm_beta` and `ssm_alpha` (or `ssm_ba`), and what
    else is `ssm_*` in a block. Files with `ssm_ba` have the value heads of a key head side by side,
    others have them `key_heads` apart. sigmoid: of `DeltaNetSpec`.
    """
    at, w = f"blk.{layer}", d.w
    spec = _spec(d, tiled=not w.has(f"{at}.ssm_ba.weight"), sigmoid=sigmoid)
    values = spec.value_heads * spec.value_length
    local = spec if w.share is None else w.share.delta_net(layer, spec)
    if local is None:
        return AbsentMixer()

    def product(name: str, n_out: int):
        return w.linear(f"{at}.{name}", d.width, n_out, role=name, split="column")

    if w.has(f"{at}.ssm_in.weight"):
        inputs = {"qkvz": product("ssm_in", spec.channels + values)}
    else:
        inputs = {
            "qkv": product("attn_qkv", spec.channels),
            "gate": product("attn_gate", values),
        }
    if spec.tiled:
        rates = {name: product(f"ssm_{name}", spec.value_heads) for name in ("beta", "alpha")}
    else:
        rates = {"ba": product("ssm_ba", 2 * spec.value_heads)}
    return DeltaNet(
        local,
        convolution=w.values(f"{at}.ssm_conv1d.weight", (spec.channels, spec.convolution)),
        dt=w.vector(f"{at}.ssm_dt.bias", spec.value_heads),
        a=w.vector(f"{at}.ssm_a", spec.value_heads),
        norm=d.rms_norm(f"{at}.ssm_norm", spec.value_length),
        output=w.linear(f"{at}.ssm_out", values, d.width, role="ssm_out", split="row"),
        **inputs,
        **rates,
    )


def _spec(d: Decoder, *, tiled: bool, sigmoid: bool) -> DeltaNetSpec:
    p = d.p
    key_heads, value_heads = p.integer("ssm.group_count"), p.integer("ssm.time_step_rank")
    inner = p.integer("ssm.inner_size")
    if value_heads % key_heads:
        raise ConfigError(
            f"delta nets have {value_heads} value heads for {key_heads} key heads, expected a"
            " multiple",
            file=p.file,
        )
    if inner % value_heads:
        raise ConfigError(
            f"metadata key '{p.architecture}.ssm.inner_size' is {inner}, expected a multiple of"
            f" {value_heads} value heads",
            file=p.file,
        )
    return DeltaNetSpec(
        key_heads,
        value_heads,
        p.integer("ssm.state_size"),
        inner // value_heads,
        p.integer("ssm.conv_kernel"),
        tiled,
        sigmoid,
    )
