"""The parts of a decode step besides its layers: angles of the rotation, and the choice of the next
token on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

EMBED = KernelSpec("step_embed", ("step/embed.cu",), (), ("step_angles",))
SAMPLE = KernelSpec(
    "step_sample", ("step/sample.cu",), (), ("sample_greedy", "sample_draw", "sample_best")
)
_THREADS = 256
MOST_BEST = 64  # candidates that `sample_best` chooses from
_BEST_THREADS = 512


def step_angles(
    rates: torch.Tensor, magnitude: float, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute cos and sin float32[rows, pairs, 2] at positions int32[rows] for rates
    float64[pairs], as `Rope.angles` makes them.
    """
    launch(
        function(EMBED, "step_angles", out.device),
        len(out),
        128,
        rates,
        np.float64(magnitude),
        positions,
        np.int32(len(rates)),
        out,
        pdl=True,
    )


class GreedySampler:
    """Choose the most probable token, the lowest among equals."""

    def __init__(self, n_vocab: int, device: torch.device):
        self._kernel, self._n = function(SAMPLE, "sample_greedy", device), n_vocab
        self._grid = max(1, min(128, -(-n_vocab // _THREADS)))
        self._partial = torch.empty(self._grid, dtype=torch.int64, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        """Choose tokens[0] from logits float32[vocab]. positions[0] advances by 1, and history at
        the new position is the token (-1 if logits are not finite). tokens is int64, the others are
        int32.
        """
        launch(
            self._kernel,
            self._grid,
            _THREADS,
            logits,
            np.int32(self._n),
            self._partial,
            self._ticket,
            tokens,
            positions,
            history,
            pdl=True,
        )


class DrawSampler:
    """Draw a token with temperature, top-k, top-p and min-p, as `runtime.network.sampling.sample`
    does. For top-k of at most `MOST_BEST` one launch finds the candidates, for others all logits
    are sorted.
    """

    def __init__(self, n_vocab: int, device: torch.device):
        self._draw, self._best, self._n = (
            *(function(SAMPLE, f"sample_{name}", device) for name in ("draw", "best")),
            n_vocab,
        )
        self._grid = -(-n_vocab // (2 * _BEST_THREADS))
        self._partial = torch.empty(self._grid * MOST_BEST, dtype=torch.int64, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        """Choose as `GreedySampler` does, with the seed int64[1] (its 64 bits) on the device."""
        n, count = np.int32(self._n), np.int32(top_k if 0 < top_k < self._n else self._n)
        how = (
            count,
            np.float64(temperature),
            np.float64(top_p),
            np.float64(min_p),
            seed,
            tokens,
            positions,
            history,
        )
        if count <= MOST_BEST:
            launch(
                self._best,
                self._grid,
                _BEST_THREADS,
                logits,
                n,
                self._partial,
                self._ticket,
                *how,
                pdl=True,
            )
        else:
            launch(self._draw, 1, 1024, *logits.sort(descending=True, stable=True), n, *how)


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [EMBED, SAMPLE]
