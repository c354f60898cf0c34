"""Rotary position embedding (Su et al., 2021) with the scalings that GGUF metadata can ask for.

Pair j of a head, at position p, is rotated by p * base^(-2j/n_rot), divided by `factors[j]` if the
file has frequency factors (those of Llama 3.1 contain its scaling). Which elements make a pair
depends on the style: `norm` takes (2j, 2j+1), `neox` takes (j, j + n_rot/2). Elements beyond n_rot
are left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import ConfigError
from ..weights.hyperparameters import Hyperparameters
from . import many_rows


@dataclass(frozen=True)
class Scaling:
    """Context extension. `linear` divides every angle by `factor`; `yarn` (Peng et al., 2023) does
    so for slow pairs only.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0  # of the file; YaRN's own 1 + 0.1 ln(factor) comes on top
    own_magnitude: bool = True  # False leaves out the 1 + 0.1 ln(factor)
    truncate: bool = True  # YaRN's correction range is rounded to whole pairs

    @classmethod
    def read(
        cls, p: Hyperparameters, *, own_magnitude: bool = True, truncate: bool = True
    ) -> Scaling:
        """Read the keys `rope.scaling.*`. ConfigError for a kind that is not known."""
        kind = p.text("rope.scaling.type", "linear")
        factor = p.number(
            "rope.scaling.factor", p.number("rope.scale_linear", 1.0, above=0), above=0
        )
        magnitude = p.number("rope.scaling.attn_factor", 1.0, above=0)
        if kind == "yarn":
            # As in transformers, where it is called attention_factor and replaces YaRN's own.
            if (whole := p.number("rope.scaling.yarn_attn_factor", 0.0)) > 0:
                magnitude, own_magnitude = magnitude * whole, False
            return cls(
                "yarn",
                factor,
                p.integer("rope.scaling.original_context_length"),
                p.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
                p.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
                magnitude,
                own_magnitude,
                truncate,
            )
        if kind in ("linear", "none"):
            return cls(kind, factor if kind == "linear" else 1.0, magnitude=magnitude)
        raise ConfigError(
            f"metadata key '{p.architecture}.rope.scaling.type' is '{kind}', expected none, linear"
            " or yarn",
            file=p.file,
        )


class Rope:
    """Rotation of query and key heads. `style` is `norm` or `neox`. `long` (tokens, rotation): the
    rotation of all positions in contexts of more than so many tokens.
    """

    split = "replicated"

    def __init__(
        self,
        style: str,
        n_rot: int,
        base: float,
        factors: torch.Tensor | None = None,
        scaling: Scaling = Scaling(),
        device: torch.device | None = None,
        long: tuple[int, Rope] | None = None,
    ):
        self.style, self.n_rot, self.long = style, n_rot, long
        pairs = torch.arange(n_rot // 2, dtype=torch.float64)
        rates = base ** (-2 * pairs / n_rot)
        if factors is not None:
            rates = rates / factors.double().cpu()
        self.magnitude = scaling.magnitude
        if scaling.kind == "yarn":
            keep = _yarn_keep(pairs, n_rot, base, scaling)
            rates = rates / scaling.factor * (1 - keep) + rates * keep
            if scaling.own_magnitude:
                self.magnitude *= 1 + 0.1 * math.log(scaling.factor)
        else:
            rates = rates / scaling.factor
        self.rates = rates.to(device)
        self._rates_on = {self.rates.device: self.rates}

    @classmethod
    def none(cls, style: str, n_rot: int) -> Rope:
        """Return a rotation by nothing, which changes no bit, for kernels that rotate."""
        return cls(style, n_rot, 1.0, torch.full((n_rot // 2,), float("inf")))

    def of_context(self, n_tokens: int) -> Rope:
        """Return the rotation for a context of so many tokens."""
        return self.long[1] if self.long is not None and n_tokens > self.long[0] else self

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, float32[n, n_rot/2], for positions int64[n]. Angles are computed in
        float64, as positions get large.
        """
        if positions.device not in self._rates_on:  # layers can be on several devices
            self._rates_on[positions.device] = self.rates.to(positions.device)
        theta = positions.double()[:, None] * self._rates_on[positions.device]
        return (theta.cos() * self.magnitude).float(), (theta.sin() * self.magnitude).float()

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x float32[..., n, heads, head_size], rotated."""
        found = many_rows.rotate(x, *angles, self.n_rot, self.style == "neox")
        if found is not None:
            return found
        cos, sin = (a[:, None, :] for a in angles)
        half, n_rot = self.n_rot // 2, self.n_rot
        out = torch.empty_like(x)
        if self.style == "norm":
            a, b, to_a, to_b = (
                x[..., 0:n_rot:2],
                x[..., 1:n_rot:2],
                out[..., 0:n_rot:2],
                out[..., 1:n_rot:2],
            )
        else:
            a, b, to_a, to_b = (
                x[..., :half],
                x[..., half:n_rot],
                out[..., :half],
                out[..., half:n_rot],
            )
        to_a.copy_(a * cos - b * sin)
        to_b.copy_(a * sin + b * cos)
        out[..., n_rot:] = x[..., n_rot:]
        return out


def _yarn_keep(pairs: torch.Tensor, n_rot: int, base: float, s: Scaling) -> torch.Tensor:
    """1 for pairs that rotate fast enough to keep their rate, 0 for those that are interpolated,
    with a ramp between.
    """

    def turns(beta: float) -> float:
        return n_rot * math.log(s.original_context / (2 * math.pi * beta)) / (2 * math.log(base))

    low, high = turns(s.beta_fast), turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(n_rot - 1, high)
    return 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
