"""Attention of a decoding step: launches of `attention/attention.cu`, and its splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..common.parts import empty_parts
from ..compile.launch import device_index, function, launch
from ..compile.occupancy import occupancy
from ..compile.spec import KernelSpec
from .shape import WARPS, AttentionShape, shared_limit

# Encoded caches with more positions are decoded in smaller tiles, the next one in flight meanwhile,
# where warps do not share tiles; and rows too long for eight warps are taken by six, which at 512
# positions take 2 us more (benchmarks/attention.py).
_LONG = 4096


class StepAttention:
    """Launch attention of one shape over caches of one capacity. Instances keep scratch, so layers
    on one stream share them. Launches of an instance must not run at the same time: blocks would
    wait without end for results that blocks of another launch have taken.
    """

    def __init__(self, shape: AttentionShape, capacity: int, device: torch.device):
        """Raise UnsupportedTypeError for heads that do not fit the device's shared memory."""
        limit = shared_limit(device)
        here = occupancy(device_index(device))
        if shape.decoded and capacity > _LONG:
            shape = replace(shape, tile_size=64, stages=2)
        shape = replace(shape, deep=min(capacity, shape.window or capacity) >= _LONG)
        self.shape, self._pieces, at_once = shape, [], shape.rows
        # Otherwise a part of the rows at a time, rather than all of them with short tiles.
        while at_once > 1 and replace(shape, rows=at_once).fitting(limit).short:
            at_once = -(-at_once // 2)
        for first in range(0, shape.rows, at_once):
            part = replace(shape, rows=min(at_once, shape.rows - first)).fitting(limit)
            blocks = part.warp_blocks if part.is_by_warp else part.blocks
            most = blocks * here.processors // shape.kv_heads
            if not part.is_by_warp:
                most = min(most, part.most_splits(*part.tile(limit)))
            # A fixed number, so that a captured launch stays valid.
            splits = max(1, min(-(-capacity // shape.shortest), most))
            part = part.of_range(-(-min(capacity, shape.window or capacity) // splits))
            kernel, cut = function(part.spec(limit), "attention", device), part.tile(limit)
            n = shape.kv_heads * splits * part.part_floats
            parts = empty_parts(n, device)
            shared = part.shared_bytes(*cut)
            if (
                part.is_by_warp
                and part.warp_blocks == 1
                and splits * shape.kv_heads <= here.processors
            ):
                # Otherwise two blocks of a short range go where the launch before ends first, and
                # other multiprocessors have none. A product's block fits beside one of so much.
                shared = max(shared, here.alone)
            self._pieces.append((first, part, kernel, shared, splits, parts))
        self.splits = max(splits for *_, splits, _ in self._pieces)
        self.full_from = self._full_from(here.processors)
        self._tickets = torch.zeros(shape.kv_heads, dtype=torch.int32, device=device)

    def _full_from(self, processors: int) -> int | None:
        """Return the number of positions from which on every multiprocessor has a block, but for
        the few that are left over because all heads have the same number of blocks. None if that
        never is so, and for kernels without tiles of warps.
        """
        _, part, _, _, splits, _ = self._pieces[0]
        blocks = (splits + 1) * part.kv_heads
        fills = len(self._pieces) == 1 and part.is_by_warp and not part.window
        return splits * part.shortest if fills and blocks > processors else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        angles: torch.Tensor | None,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        *,
        biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        sinks: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> None:
        """Compute attention for rows of q, k, v (float32, heads side by side) at positions[0],
        positions[0] + 1, ... (int32 on the device). The rows are normed, rotated and appended to
        the caches, and `out` float32[rows, heads * value_length] gets the weighted sum of all
        values so far.

        angles: float32[rows, n_rot/2, 2], cosine and sine, for shapes that rotate. The caches must
        have the capacity.
        biases: float32 of q, k and v, sinks float32[heads], and gates float32[rows, heads *
        value_length], or [rows, heads], that are apart, for shapes that have them.
        """
        q_bias, k_bias, v_bias = biases or (None, None, None)
        for first, part, kernel, shared, splits, parts in self._pieces:
            rows = slice(first, first + part.rows)
            # A later piece reads the cache entries of the previous one without waiting, so the two
            # must not overlap.
            launch(
                kernel,
                (splits, part.kv_heads),
                32 * (part.warps if part.is_by_warp else WARPS),
                q[rows],
                k[rows],
                v[rows],
                q_norm,
                k_norm,
                np.float32(eps),
                None if angles is None else angles[rows],
                cache_k,
                cache_v,
                positions[rows],
                np.float32(scale),
                q_bias,
                k_bias,
                v_bias,
                sinks,
                parts,
                self._tickets,
                out[rows],
                *(() if gates is None else (gates[rows],)),
                shared=shared,
                pdl=first == 0,
            )


def specs() -> list[KernelSpec]:
    """Return the shapes of the models in the benchmarks, and every cache type once. Others are
    compiled on first use.
    """
    shapes = [
        AttentionShape(1, 8, 4, 128, 128, "F16", "F16", 128, True, True),
        AttentionShape(8, 4, 2, 64, 64, "BF16", "BF16", 64, False),
        AttentionShape(1, 4, 2, 64, 64, "Q8_0", "Q4_0", 64, False, False, 64, 64),
        AttentionShape(2, 1, 2, 32, 72, "Q4_1", "F32", 32, True),
        AttentionShape(1, 4, 2, 128, 128, "Q8_KV", "Q8_0", 128, True),
        AttentionShape(2, 4, 2, 96, 32, "Q5_0", "IQ4_NL", 64, True),
        AttentionShape(1, 2, 2, 64, 64, "Q5_1", "Q6_0", 64, False),
        AttentionShape(
            1, 8, 8, 64, 64, "F16", "F16", 64, True, biases=True, sinks=True, window=128
        ),
        AttentionShape(
            2,
            4,
            2,
            32,
            32,
            "F32",
            "F32",
            16,
            True,
            biases=True,
            value_norm=True,
            gate=True,
            sinks=True,
            window=70,
            softcap=30.0,
            temperature=(0.1, 64, 0),
        ),
        AttentionShape(1, 2, 2, 64, 64, "F16", "F16", 64, True, own_kv=False),
        AttentionShape(1, 4, 8, 128, 128, "F16", "F16", 128, True, True, norms_last=True),
        AttentionShape(1, 6, 8, 128, 128, "F16", "F16", 128, True, gate=True, gate_apart=True),
        AttentionShape(
            *(1, 12, 8, 128, 128, "F16", "F16", 128, True, True),
            gate=True,
            gate_apart=True,
            head_gates=True,
            window=512,
        ),
        AttentionShape(1, 8, 2, 512, 512, "F16", "F16", 512, True).fitting(96 * 1024),
    ]
    return [shape.spec(96 * 1024) for shape in shapes]
