"""What a decoding step exchanges with the host, whose processor evaluates experts: `offload.cu`."""

from __future__ import annotations

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

THREADS = 512
OFFLOAD = KernelSpec("step_offload", ("step/offload.cu",), (), ("hand_over", "take_back"))
TIMEOUT = 600  # seconds that a device waits for the host
_NOBODY = -1  # as an unsigned number, more than any that a device waits for


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [OFFLOAD]


class Exchange:
    """Memory that a device and the host share for steps of up to `rows` rows, page-locked where the
    device is a GPU: x float32[rows, width], what the router chose int64[rows, used] and
    shares float32[rows, used] from the device, y float32[rows, width] from the host. `request` and
    `reply` int64[1] count exchanges; `failed` int32[1] is 1 if the device has waited for `TIMEOUT`
    seconds, and does not wait any more.
    """

    def __init__(self, rows: int, width: int, used: int, device: torch.device):
        pinned = device.type == "cuda"
        self.device, self.width, self.used = device, width, used
        self.x = torch.zeros(rows, width, pin_memory=pinned)
        self.y = torch.zeros(rows, width, pin_memory=pinned)
        self.chosen = torch.zeros(rows, used, dtype=torch.int64, pin_memory=pinned)
        self.shares = torch.zeros(rows, used, pin_memory=pinned)
        # In cache lines of their own, as each is written by one side and polled by the other.
        self._flags = torch.zeros(24, dtype=torch.int64, pin_memory=pinned)
        self.request, self.reply = self._flags[:1], self._flags[8:9]
        self.failed = self._flags[16:17].view(torch.int32)[:1]
        self.number = torch.zeros(1, dtype=torch.int64, device=device)

    def abandon(self) -> None:
        """Let the device go on without answers: what it computes from now on means nothing."""
        self.reply[0] = _NOBODY

    def settle(self) -> None:
        """Begin again after the device has stopped asking."""
        self.reply.copy_(self.request)
        self.failed[0] = 0

    def hand_over(
        self,
        h: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Send h / sqrt(mean(h^2) + eps) * norm of h float32[n, width], with the experts int32[n,
        used] (-1: none) and their weights float32[n, used].
        """
        n, width = h.shape
        launch(
            function(OFFLOAD, "hand_over", h.device),
            1,
            THREADS,
            h,
            norm,
            np.float32(eps),
            ids,
            weights,
            np.int32(n),
            np.int32(width),
            np.int32(self.used),
            self.x,
            self.chosen,
            self.shares,
            self.request,
            self.number,
            pdl=True,
        )

    def take_back(self, to: torch.Tensor) -> None:
        """Wait for the host, and add its result to float32[n, width], n * width a multiple of 4."""
        launch(
            function(OFFLOAD, "take_back", to.device),
            1,
            THREADS,
            self.y,
            to,
            np.int32(to.numel()),
            self.reply,
            self.number,
            self.failed,
            np.uint64(TIMEOUT * 10**9),
            pdl=True,
        )
