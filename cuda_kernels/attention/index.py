"""The choice of positions of sparse attention: `attention/index.cu` for one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .shape import TYPES

THREADS, WARPS, SELECT_THREADS = 256, 8, 1024
_MOST_QUERY = 40 * 1024  # bytes of the queries of a row
_FUNCTIONS = ("index_rows", "index_scores", "index_select")


@dataclass(frozen=True)
class IndexShape:
    """The shape that the kernels are compiled for: `heads` of `length` elements, of which the first
    `rotated` are rotated; type: of the cache, by ggml name; top_k: positions that a row sees.
    """

    heads: int
    length: int
    rotated: int
    type: str
    top_k: int
    neox: bool = False

    @property
    def fits(self) -> bool:
        """Return whether there are kernels for the shape."""
        return (
            self.type in ("F32", "F16", "BF16")
            and self.length % 32 == 0
            and self.length <= 128
            and self.rotated % 2 == 0
            and self.rotated <= self.length
            and 4 * self.heads * self.length <= _MOST_QUERY
        )

    @property
    def spec(self) -> KernelSpec:
        """Return the three kernels of attention/index.cu."""
        values = {
            "HEADS": self.heads,
            "LENGTH": self.length,
            "N_ROT": self.rotated,
            "NEOX_PAIRS": str(self.neox).lower(),
            "TYPE_K": TYPES[self.type],
            "TOP_K": self.top_k,
        }
        return KernelSpec(
            f"index_{self.type}_{self.heads}x{self.length}_{self.top_k}".lower(),
            ("attention/index.cu",),
            tuple((key, str(value)) for key, value in values.items()),
            _FUNCTIONS,
        )


def index_rows(
    shape: IndexShape,
    q: torch.Tensor,
    k: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    angles: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Rotate queries float32[n, heads * length] in place, and write keys float32[n, length] after
    their LayerNorm and rotation to rows positions[0], positions[0] + 1, ... (int32 on the device)
    of cache [capacity, 1, length]. angles: float32[n, rotated/2, 2], cosine and sine.
    """
    n = len(q)
    launch(
        function(shape.spec, "index_rows", q.device),
        -(-n * (shape.heads + 1) // WARPS),
        THREADS,
        q,
        k,
        norm,
        bias,
        np.float32(eps),
        angles,
        cache,
        positions,
        np.int32(n),
        pdl=True,
    )


def index_scores(
    shape: IndexShape,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """Write scores float32[n, capacity] of the positions up to the last row, for rotated queries
    float32[n, heads * length] and weights float32[n, heads].
    """
    n, capacity = scores.shape
    launch(
        function(shape.spec, "index_scores", q.device),
        -(-capacity // THREADS),
        THREADS,
        q,
        weights,
        cache,
        positions,
        scores,
        np.int32(capacity),
        np.int32(n),
        pdl=True,
    )


def index_select(
    shape: IndexShape,
    scores: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    *,
    pdl: bool = True,
) -> None:
    """Write the positions that each row sees to chosen int32[n, top_k], ascending, -1 after the
    last: those with the largest scores float32[n, ...], lower ones among equals, of the positions
    up to positions[0] + row.
    """
    launch(
        function(shape.spec, "index_select", scores.device),
        len(chosen),
        SELECT_THREADS,
        scores,
        positions,
        np.int32(scores.stride(0)),
        chosen,
        pdl=pdl,
    )


def specs() -> list[KernelSpec]:
    """Return the shape of GLM-5. Others are compiled on first use."""
    return [IndexShape(32, 128, 64, "F16", 2048).spec]
