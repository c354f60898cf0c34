"""The choice of experts in a decoding step: `router.cu` for one shape."""

from __future__ import annotations

import functools

import numpy as np
import torch

from .compile.launch import function, launch
from .compile.spec import KernelSpec

THREADS = 128
MOST_USED, MOST_LOGITS = 32, 8192  # the last in shared memory


def fits(rows: int, width: int, n_experts: int, n_used: int) -> bool:
    """Return whether there is a kernel for the shape."""
    return width % 4 == 0 and n_used <= MOST_USED and rows * n_experts <= MOST_LOGITS


@functools.cache
def router_spec(
    rows: int, width: int, n_experts: int, n_used: int, reduction: tuple[int, float] | None = None
) -> KernelSpec:
    least, threshold = reduction or (n_used, 0.0)
    defines = {
        "ROWS": rows,
        "WIDTH": width,
        "EXPERTS": n_experts,
        "N_USED": n_used,
        "LEAST": least,
        "THRESHOLD": f"{float(np.float32(threshold)).hex()}f",
    }
    return KernelSpec(
        f"router_{width}x{n_experts}x{rows}",
        ("step/router.cu",),
        tuple((k, str(v)) for k, v in defines.items()),
        ("router",),
    )


class StepRouter:
    """Launch the router of one shape. Instances keep scratch, so layers on one stream share
    them.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        n_experts: int,
        n_used: int,
        device: torch.device,
        reduction: tuple[int, float] | None = None,
    ):
        """A shape that `fits`. reduction (K, t): experts after the K best only where their
        probability exceeds t times the largest.
        """
        self._kernel, self._grid = (
            function(router_spec(rows, width, n_experts, n_used, reduction), "router", device),
            n_experts,
        )
        self._logits = torch.empty(rows, n_experts, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self,
        h: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        matrix: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Choose experts for h float32[rows, width] with matrix float32[n_experts, width]: ids
        int32[rows, n_used] and weights float32[rows, n_used].

        The weights are the softmax over all experts of matrix * norm(h), the most probable first
        (the lower expert among equals), normalized to a sum of 1. Experts left out by `reduction`
        have id -1 and weight 0.
        """
        launch(
            self._kernel,
            self._grid,
            THREADS,
            h,
            norm,
            np.float32(eps),
            matrix,
            self._logits,
            self._ticket,
            ids,
            weights,
            pdl=True,
        )


def specs() -> list[KernelSpec]:
    """Return the shape of Qwen3-30B-A3B, and a small one. Others are compiled on first use."""
    return [router_spec(1, 2048, 128, 8), router_spec(8, 512, 6, 2, (1, 0.5))]
