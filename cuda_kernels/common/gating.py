"""What experts compute besides products: how gate and up are joined, biases, and scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# ACTIVATION of units/gating.cuh
ACTIVATIONS = ("silu", "gelu", "gelu_erf", "swiglu_oai", "relu", "capped_silu")


@dataclass(frozen=True)
class Gating:
    """activation(gate) * up. With a `limit` the gate is first clamped to at most the limit, and up
    to within the limit of 0; `capped_silu` clamps silu(gate) instead of the gate.
    `swiglu_oai` is gate * sigmoid(1.702 gate) * (up + 1). Squared ReLU without a gate is
    `relu` with gate and up the same.
    """

    activation: str = "silu"
    limit: float = 0.0

    @property
    def is_known(self) -> bool:
        """Return whether kernels evaluate it."""
        return self.activation in ACTIVATIONS and self.limit >= 0

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Return the macros of units/gating.cuh."""
        return (
            ("ACTIVATION", str(ACTIVATIONS.index(self.activation))),
            ("LIMIT", f"{float(np.float32(self.limit)).hex()}f"),
        )

    @property
    def suffix(self) -> str:
        """Return the end of a kernel's name; empty for plain silu."""
        name = "" if self.activation == "silu" else f"_{self.activation}"
        return name + (f"_{self.limit:g}" if self.limit else "")


@dataclass(frozen=True, eq=False)
class ExpertTerms:
    """A product with the matrix of expert e is scale[e] * W_e x + bias[e].

    bias: float32[experts, rows]; scale: float32[experts].
    """

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return self.bias is not None or self.scale is not None


NO_TERMS = ExpertTerms()
