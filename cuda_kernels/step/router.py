"""The choice of experts in a decoding step: `router.cu` for one shape."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..common.parts import empty_parts
from ..common.routing import Routing
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

THREADS = 128
MOST_USED, MOST_LOGITS = 32, 8192  # the last in shared memory


def fits(rows: int, width: int, n_experts: int, n_used: int, routing: Routing = Routing()) -> bool:
    """Return whether there is a kernel for the shape."""
    return (
        width % 4 == 0
        and n_used <= MOST_USED
        and rows * n_experts <= MOST_LOGITS
        and n_experts % routing.groups == 0
        and routing.groups <= THREADS
        and routing.group_best <= min(2, n_experts // routing.groups)
    )


@functools.cache
def router_spec(
    rows: int,
    width: int,
    n_experts: int,
    n_used: int,
    reduction: tuple[int, float] | None = None,
    routing: Routing = Routing(),
) -> KernelSpec:
    """Return the kernel that routes `rows` tokens of `width` elements. reduction: (K, t) as
    `--smart-expert-reduction` has it.
    """
    least, threshold = reduction or (n_used, 0.0)
    defines = {
        "ROWS": rows,
        "WIDTH": width,
        "EXPERTS": n_experts,
        "N_USED": n_used,
        "LEAST": least,
        "THRESHOLD": f"{float(np.float32(threshold)).hex()}f",
        "SIGMOID": int(routing.sigmoid),
        "NORM": int(routing.norm),
        "SCALE": f"{float(np.float32(routing.scale)).hex()}f",
        "CHOICE_BIAS": int(routing.choice_bias),
        "LOGIT_BIAS": int(routing.logit_bias),
        "GROUPS": routing.groups,
        "GROUPS_USED": routing.groups_used,
        "FIRST": (routing.owned or (0, n_experts))[0],
        "LAST": (routing.owned or (0, n_experts))[1],
        "SHARED_SLOTS": routing.shared,
        "SHARED_GATE": int(routing.shared_gate),
        "GROUP_BEST": min(routing.group_best, n_experts // routing.groups),
    }
    return KernelSpec(
        f"router_{width}x{n_experts}x{rows}",
        ("step/router.cu",),
        tuple((k, str(v)) for k, v in defines.items()),
        ("router",),
    )


class StepRouter:
    """Launch the router of one shape. Instances keep scratch, so layers on one stream share
    them. Launches of an instance must not run at the same time: a block would wait without end for
    logits that another launch has taken.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        n_experts: int,
        n_used: int,
        device: torch.device,
        reduction: tuple[int, float] | None = None,
        routing: Routing = Routing(),
    ):
        """A shape that `fits`. reduction (K, t): experts after the K best only where their score
        exceeds t times the largest.
        """
        spec = router_spec(rows, width, n_experts, n_used, reduction, routing)
        self._kernel, self._grid = function(spec, "router", device), n_experts + routing.shared_gate
        self._parts = empty_parts(2 * rows * self._grid, device)

    def __call__(
        self,
        h: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        matrix: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        logit_bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        """Choose experts for h float32[rows, width] with matrix float32[n_experts, width]: ids
        int32[rows, n_used] and weights float32[rows, n_used + shared], the best first (the lower
        expert among equals), those of a shared expert at the end: sigmoid(shared_gate *
        norm(h)) for shared_gate float32[width], or 1.

        Scores are the softmax over all experts, or the sigmoids, of matrix * norm(h) + logit_bias;
        experts are chosen by score + choice_bias. The biases are float32[n_experts], for a routing
        that has them. Experts left out by `reduction` have id -1 and weight 0.
        """
        launch(
            self._kernel,
            self._grid,
            THREADS,
            h,
            norm,
            np.float32(eps),
            matrix,
            logit_bias,
            choice_bias,
            shared_gate,
            self._parts,
            ids,
            weights,
            pdl=True,
        )


def specs() -> list[KernelSpec]:
    """Return the shapes of some models, and a small one. Others are compiled on first use."""
    grouped = Routing(True, True, 2.5, True, False, 8, 4)
    return [
        router_spec(1, 2048, 128, 8),
        router_spec(8, 512, 6, 2, (1, 0.5)),
        router_spec(1, 7168, 256, 8, None, grouped),
        router_spec(1, 2880, 32, 4, None, Routing(logit_bias=True)),
        router_spec(1, 2048, 60, 4, None, Routing(norm=False, shared=4, shared_gate=True)),
        router_spec(1, 2048, 512, 10, None, Routing(shared=1, shared_gate=True)),
        router_spec(8, 2048, 1024, 32, None, Routing(sigmoid=True)),
    ]
