"""The choice of experts in a decoding step: `router.cu` for one shape."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch

from .compile import KernelSpec
from .launch import function, launch

CLUSTER, WARPS = 8, 16  # blocks, and warps of a block
LANE_FLOATS = 64  # of a router row at most in the registers of a lane
MOST_EXPERTS, MOST_USED, MOST_SUMS = 1024, 32, 10000  # the last of float32 in shared memory


def parts(width: int) -> int:
    """Into how many parts a router row is cut."""
    return -(-width // (32 * LANE_FLOATS))


def fits(rows: int, width: int, n_experts: int, n_used: int) -> bool:
    """Whether there is a kernel for the shape."""
    return (width % 4 == 0 and n_experts <= MOST_EXPERTS and n_used <= MOST_USED
            and rows * (n_experts + 1) * parts(width) <= MOST_SUMS)


@functools.cache
def router_spec(rows: int, width: int, n_experts: int, n_used: int, reduction: tuple[int, float] | None = None,
                clustered: bool = False) -> KernelSpec:
    least, threshold = reduction or (n_used, 0.0)
    defines = {"ROWS": rows, "WIDTH": width, "EXPERTS": n_experts, "N_USED": n_used, "PARTS": parts(width), "WARPS": WARPS,
               "CLUSTER": CLUSTER if clustered else 0, "LEAST": least, "THRESHOLD": f"{float(np.float32(threshold)).hex()}f"}
    return KernelSpec(f"router_{width}x{n_experts}x{rows}" + "_cluster" * clustered, ("router.cu",),
                      tuple((k, str(v)) for k, v in defines.items()), ("router",))


class StepRouter:
    """Launches the router of one shape. Instances keep scratch, so layers on one stream share them."""

    def __init__(self, rows: int, width: int, n_experts: int, n_used: int, device: torch.device,
                 reduction: tuple[int, float] | None = None, clustered: bool | None = None):
        """A shape that `fits`. reduction (K, t): experts after the K best only where their probability exceeds t times the largest.
        clustered: else wherever the device can."""
        clustered = torch.cuda.get_device_capability(device) >= (9, 0) if clustered is None else clustered
        self._kernel = function(router_spec(rows, width, n_experts, n_used, reduction, clustered), "router", device)
        self._grid, self._cluster = (CLUSTER, CLUSTER) if clustered else (-(-n_experts * parts(width) // WARPS), None)
        self._partial = torch.empty(rows, (n_experts + 1) * parts(width), device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, h: torch.Tensor, norm: torch.Tensor, eps: float, matrix: torch.Tensor, ids: torch.Tensor,
                 weights: torch.Tensor) -> None:
        """h float32[rows, width], matrix float32[n_experts, width] -> ids int32[rows, n_used], weights float32[rows, n_used]: softmax over
        all experts of matrix * norm(h), the most probable first (the lower expert among equals), brought to a sum of 1.
        Experts left out by `reduction` have id -1 and weight 0."""
        launch(self._kernel, self._grid, 32 * WARPS, h, norm, np.float32(eps), matrix, self._partial, self._ticket, ids, weights, pdl=True,
               cluster=self._cluster)


def specs() -> list[KernelSpec]:
    """The shape of Qwen3-30B-A3B, and one with little of everything. Others are compiled when they are met."""
    return [router_spec(1, 2048, 128, 8), router_spec(8, 512, 6, 2, (1, 0.5)),
            replace(router_spec(1, 2048, 128, 8, None, True), archs=("sm_90", "sm_100", "sm_120"))]
