"""Latent attention in its absorbed form, of a decoding step and of few rows of a prompt:
`attention/mla.cu` for one shape.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .mla_shape import (
    FUNCTIONS,
    KEY_ROWS,
    MOST_SPLITS,
    PAIRS,
    SHORTEST,
    TEAMS,
    THREADS,
    LatentShape,
)
from .shape import shared_limit


class LatentRows:
    """Launch latent attention of `shape.rows` rows over the positions up to their own, with queries
    that are made already. Keeps no memory.
    """

    def __init__(self, shape: LatentShape, device: torch.device):
        """A shape that `fits`."""
        limit, self.shape = shared_limit(device), shape.on(device)
        spec = self.shape.spec(limit)
        self._kernels = [function(spec, name, device) for name in FUNCTIONS[1:]]
        self._shared = self.shape.shared_bytes(*self.shape.tile(limit))
        self._clusters = torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(
        self,
        queries: torch.Tensor,
        rows: torch.Tensor,
        position: torch.Tensor,
        values: torch.Tensor,
        partial: torch.Tensor,
        splits: int,
        out: torch.Tensor,
        chosen: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """Write out float32[shape.rows, heads * value] for rows at position[0] (int32 on the
        device), position[0] + 1, ...

        queries: as for `attend_chosen`; rows: [positions, rope + rank] in the type of the shape, or
        bytes of encoded rows; chosen: as for `StepLatentAttention`; pdl: whether launches overlap;
        values: half[heads, value, rank], contiguous; splits: of `splits_of`; partial: float32
        memory of shape.tiles * splits * shape.part_floats elements.
        """
        s = self.shape
        attention, results = self._kernels
        launch(
            attention,
            (splits, s.tiles),
            TEAMS * THREADS,
            queries,
            rows,
            position,
            partial,
            chosen,
            np.int32(s.rows),
            shared=self._shared,
            pdl=pdl,
        )
        launch(
            results,
            (s.heads, s.value_blocks),
            THREADS,
            partial,
            position,
            np.int32(splits),
            values,
            out,
            pdl=pdl,
            cluster=(1, s.cluster) if self._clusters and s.cluster > 1 else None,
        )


class StepLatentAttention:
    """Launch latent attention of one shape over caches of up to `capacity` positions. Instances
    keep scratch, so layers on one stream share them.
    """

    def __init__(self, shape: LatentShape, splits: int, device: torch.device):
        """A shape that `fits`. splits: of `splits_of`."""
        self._attend = LatentRows(shape, device)
        shape = self._attend.shape
        self.shape, self.splits = shape, splits
        self._make_queries = function(shape.spec(shared_limit(device)), FUNCTIONS[0], device)
        half = torch.bfloat16 if shape.type == "BF16" else torch.float16
        self._queries = torch.zeros(shape.tiles * PAIRS, 2, shape.width, dtype=half, device=device)
        self._partial = torch.empty(shape.tiles * splits * shape.part_floats, device=device)

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        angles: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:
        """Compute attention for rows at positions[0], positions[0] + 1, ... (int32 on the device):
        out float32[rows, heads * value].

        q: float32[rows, heads * (nope + rope)]; kv: float32[rows, rank + rope], the latent vector
        before its norm and the key before its rotation; angles: float32[rows, rope/2, 2], cosine
        and sine; keys: half[heads, rank, nope], W_k transposed; values: half[heads, value, rank];
        cache: [capacity, 1, rope + rank], or bytes of encoded rows, which gets the new rows.
        chosen: int32[rows, shape.chosen], the positions that each row sees, ascending, -1 after the
        last.
        """
        s = self.shape
        launch(
            self._make_queries,
            (s.heads + 1, -(-s.rank // KEY_ROWS)),
            THREADS,
            q,
            kv,
            norm,
            np.float32(eps),
            angles,
            keys,
            cache,
            positions,
            np.float32(scale),
            self._queries,
            pdl=True,
        )
        self._attend(
            self._queries, cache, positions, values, self._partial, self.splits, out, chosen, True
        )


def attend_chosen(
    shape: LatentShape,
    queries: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    position: torch.Tensor,
    partial: torch.Tensor,
) -> torch.Tensor:
    """Attend to chosen positions for any number of rows at position[0] (int32 on the device),
    position[0] + 1, ...; return mixtures of latent vectors float32[n, heads, rank].

    queries: [n * heads + PAIRS, 2, rope + rank] in the type of the rows, the rounded values and the
    rounding errors, with the factor of exponentials to the base 2; rows: [positions, rope + rank];
    chosen: int32[n, shape.chosen]; partial: float32 memory of n * shape.row_tiles *
    shape.part_floats elements.
    """
    n, limit = len(chosen), shared_limit(rows.device)
    tiles = n * shape.row_tiles
    launch(
        function(shape.spec(limit), "latent_attention", rows.device),
        (1, tiles),
        TEAMS * THREADS,
        queries,
        rows,
        position,
        partial,
        chosen,
        np.int32(n),
        shared=shape.shared_bytes(*shape.tile(limit)),
    )
    mixes, _, sums = partial.view(tiles, -1).split([PAIRS * shape.rank, PAIRS, PAIRS], 1)
    mixed = mixes.view(tiles, PAIRS, shape.rank) / sums[..., None]
    return mixed.view(n, -1, shape.rank)[:, : shape.heads]


def splits_of(shape: LatentShape, capacity: int, device: torch.device) -> int:
    """Return the ranges that positions are divided into, at most: a number that only the shape, the
    capacity and the device determine, so that a captured launch stays valid.
    """
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    most = min(MOST_SPLITS, max(1, blocks // shape.tiles))
    return max(1, min(-(-capacity // SHORTEST), most))


def specs() -> list[KernelSpec]:
    """Return the shapes of DeepSeek-V2-Lite and V3. Others are compiled on first use."""
    shapes = [
        LatentShape(1, 16, 128, 64, 512, 128, "F16", torch.float16),
        LatentShape(8, 16, 128, 64, 512, 128, "BF16", torch.bfloat16),
        LatentShape(1, 128, 128, 64, 512, 128, "F16", torch.float16),
        LatentShape(8, 128, 128, 64, 512, 128, "F16", torch.float16),
        LatentShape(1, 16, 128, 64, 512, 128, "Q8_0", torch.float16),
        LatentShape(2, 4, 192, 64, 256, 128, "F16", torch.bfloat16, True, (0.1, 8192)),
        LatentShape(1, 64, 192, 64, 512, 256, "F16", torch.float16, chosen=2048),
    ]
    shapes += [replace(shape, warpgroup=True) for shape in shapes[:4]]
    little = LatentShape(1, 16, 128, 64, 512, 128, "F32", torch.float16).spec(97 * 1024)
    return [*(shape.spec(224 * 1024) for shape in shapes), little]
