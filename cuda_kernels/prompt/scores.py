"""Scores of many rows for few columns, in float32, by tensor cores: routers of prompts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap

_TOKENS, _COLUMNS, _DEPTH = 64, 128, 32  # of a block's tile
_THREADS = 256
_ROW_BYTES = {torch.float32: _DEPTH * 4 + 64, torch.bfloat16: _DEPTH * 2 + 32}
_FEWEST_STAGES = 4  # of a part
MOST_PARTS, MOST_COLUMNS = 16, 512

SPEC = KernelSpec(
    "prompt_scores_of_rows",
    ("prompt/scored.cu",),
    (),
    ("scores_of_rows", "scores_of_rows_bf16"),
)


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [SPEC]


def _shared_bytes(dtype: torch.dtype) -> int:
    """Return the shared memory of a block for weights of this dtype."""
    return 4 * (_TOKENS * _ROW_BYTES[torch.float32] + _COLUMNS * _ROW_BYTES[dtype])


def fits(n: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether `scores` takes this many columns of scores, rows of this width, and weights of
    this dtype.
    """
    facts = _facts(device)
    enough = facts.shared_memory_per_block_optin >= _shared_bytes(dtype)
    # Devices before 8.0 have no such products.
    return n <= MOST_COLUMNS and width % _DEPTH == 0 and enough and facts.major >= 8


def shortened(weights: torch.Tensor) -> torch.Tensor:
    """Return weights float32[n, width] in bfloat16 if that loses nothing, else as they are. In
    bfloat16 scores take half as many instructions of tensor cores. The host waits for the device.
    """
    short = weights.bfloat16()
    return short if torch.equal(short.float(), weights) else weights


def plan(tokens: int, n: int, width: int, multiprocessors: int) -> tuple[int, int]:
    """Return the number of parts, and the stages of each (but the last)."""
    tiles, stages = -(-tokens // _TOKENS) * -(-n // _COLUMNS), width // _DEPTH
    parts = max(1, min(multiprocessors // tiles, stages // _FEWEST_STAGES, MOST_PARTS))
    depth = -(-stages // parts)
    return -(-stages // depth), depth


def parts_of(tokens: int, width: int, n: int, device: torch.device) -> int:
    """Return how many parts `scores` writes."""
    return plan(tokens, n, width, _facts(device).multi_processor_count)[0]


def scores(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Compute the scores of rows x float32[T, width] for weights [n, width] in float32 or bfloat16,
    whose sum over the parts is x W^T: out float32[parts_of(...), T, n].
    """
    (tokens, width), n = x.shape, len(weights)
    parts, depth = plan(tokens, n, width, _facts(x.device).multi_processor_count)
    name = "scores_of_rows_bf16" if weights.dtype == torch.bfloat16 else "scores_of_rows"
    launch(
        function(SPEC, name, x.device),
        (-(-tokens // _TOKENS), -(-n // _COLUMNS), parts),
        _THREADS,
        x,
        weights,
        np.int32(tokens),
        np.int32(n),
        np.int32(width),
        np.int32(depth),
        out,
        shared=_shared_bytes(weights.dtype),
        pdl=overlap(len(x)),
    )


@functools.cache
def _facts(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
