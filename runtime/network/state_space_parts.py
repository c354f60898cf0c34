"""Builders of the state-space layers of Mamba-2 from the tensors of a block."""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.absent import AbsentMixer
from ..layers.recurrent.state_space import StateSpace
from ..layers.specs import StateSpaceSpec
from .decoder import Decoder


def state_space(d: Decoder, layer: int, *, may_lack_norm: bool = False) -> StateSpace | AbsentMixer:
    """`ssm_*` of a block, or nothing where this rank has no part of it. may_lack_norm: there is no
    norm where the file has none. Raise ConfigError for sizes that contradict each other.
    """
    at, w, s = f"blk.{layer}", d.w, _spec(d)
    local = s if w.share is None else w.share.state_space(layer, s)
    if local is None:
        return AbsentMixer()
    read_norm = w.optional_values if may_lack_norm else w.values
    return StateSpace(
        local,
        input=w.linear(f"{at}.ssm_in", d.width, s.inputs, role="ssm_in", split="column"),
        convolution=w.values(f"{at}.ssm_conv1d.weight", (s.channels, s.convolution)),
        bias=w.optional_vector(f"{at}.ssm_conv1d.bias", s.channels),
        dt=w.vector(f"{at}.ssm_dt.bias", s.heads),
        a=w.values(f"{at}.ssm_a", (s.heads, 1)).flatten(),
        d=w.values(f"{at}.ssm_d", (s.heads, 1)).flatten(),
        norm=read_norm(f"{at}.ssm_norm.weight", (s.groups, s.inner // s.groups)),
        eps=d.eps,
        output=w.linear(f"{at}.ssm_out", s.inner, d.width, role="ssm_out", split="row"),
    )


def _spec(d: Decoder) -> StateSpaceSpec:
    p = d.p
    heads, groups = p.integer("ssm.time_step_rank"), p.integer("ssm.group_count")
    inner = p.integer("ssm.inner_size")
    if inner % heads or heads % groups:
        raise ConfigError(
            f"state-space layers have {inner} elements in {heads} heads of {groups} groups,"
            " expected multiples",
            file=p.file,
        )
    return StateSpaceSpec(
        heads,
        inner // heads,
        p.integer("ssm.state_size"),
        groups,
        p.integer("ssm.conv_kernel"),
    )
