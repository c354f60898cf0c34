"""Builders of the selective state spaces of the first Mamba from the tensors of a block."""

from __future__ import annotations

from ..layers.absent import AbsentMixer
from ..layers.recurrent.selective import Selective
from ..layers.specs import SelectiveSpec
from .decoder import Decoder

_EPS = 1e-6  # of norms without weights (Falcon-Mamba), for which there is no key


def selective(d: Decoder, layer: int) -> Selective | AbsentMixer:
    """`ssm_*` of a block, with `ssm_dt_norm`, `ssm_b_norm` and `ssm_c_norm` if the file has
    them, or nothing where another rank has it. Raise ConfigError for sizes that
    are missing or not possible.
    """
    at, w, p = f"blk.{layer}", d.w, d.p
    weighted = w.has(f"{at}.ssm_dt_norm.weight")
    eps = d.eps if weighted else _EPS if p.flag("ssm.dt_b_c_rms", False) else None
    s = SelectiveSpec(
        p.integer("ssm.inner_size"),
        p.integer("ssm.state_size"),
        p.integer("ssm.time_step_rank"),
        p.integer("ssm.conv_kernel"),
        eps,
    )
    if w.share is not None and not w.share.has_recurrence(layer):
        return AbsentMixer()
    n, sizes = s.channels, {"dt": s.rank, "b": s.state_length, "c": s.state_length}
    chosen = sum(sizes.values())
    norms = tuple(w.vector(f"{at}.ssm_{x}_norm.weight", k) for x, k in sizes.items() if weighted)
    return Selective(
        s,
        input=w.linear(f"{at}.ssm_in", d.width, 2 * n, role="ssm_in", split="column"),
        convolution=w.values(f"{at}.ssm_conv1d.weight", (n, s.convolution)),
        bias=w.optional_vector(f"{at}.ssm_conv1d.bias", n),
        vectors=w.linear(f"{at}.ssm_x", n, chosen, role="ssm_x", split="column"),
        steps=w.linear(f"{at}.ssm_dt", s.rank, n, role="ssm_dt", split="column"),
        a=w.values(f"{at}.ssm_a", (n, s.state_length)),
        d=w.vector(f"{at}.ssm_d", n),
        output=w.linear(f"{at}.ssm_out", n, d.width, role="ssm_out", split="row"),
        norms=norms or None,
    )
