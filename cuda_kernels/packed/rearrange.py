"""Run tables of bit moves over many blocks at once: with torch on any device, and with one kernel
on CUDA devices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ...formats.codecs.bit_moves import Moves
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

SPEC = KernelSpec("rearrange", ("weights/rearrange.cu",), (), ("rearrange",))
_THREADS = 256
_EACH = 32  # blocks of a thread, as in the kernel
_GRID = 1 << 16


def specs() -> list[KernelSpec]:
    """Return all kernels of this module."""
    return [SPEC]


@dataclass(frozen=True)
class ByteRun:
    """A run of bytes of the result of a block, and its place: `base`, plus steps for the group of
    rows and for the block.
    """

    n_bytes: int
    base: int
    group_step: int
    block_step: int


def rearrange(
    moves: Moves,
    source: torch.Tensor,
    head: int,
    result: torch.Tensor,
    segments: list[ByteRun],
    groups: int,
    blocks: int,
    source_step: int,
) -> None:
    """Fill bytes of `result` uint8[n] from `source` uint8[groups, bytes], whose blocks of
    `source_step` bytes begin at byte `head`.

    The segments have the bytes that the moves make, one after the other. Both tensors are
    contiguous, on one device.
    """
    if not groups:
        return
    if not source.is_cuda:
        _by_torch(moves, source, head, result, segments, groups, blocks, source_step)
        return
    with torch.cuda.device(source.device):
        launch(
            function(SPEC, "rearrange", source.device),
            min(_GRID, -(-groups * blocks // (_EACH * max(1, _THREADS // len(moves.flips))))),
            _THREADS,
            *_arguments(moves, source, head, result, segments, groups, blocks, source_step),
        )


def _arguments(
    moves: Moves,
    source: torch.Tensor,
    head: int,
    result: torch.Tensor,
    segments: list[ByteRun],
    groups: int,
    blocks: int,
    source_step: int,
) -> list:
    """Return the kernel's arguments, with tensors on the device of `source`."""
    packed, starts, flips = _tables(_Key(moves), source.device)
    lengths = np.array([s.n_bytes for s in segments])
    firsts = np.cumsum(lengths) - lengths
    places = np.array(
        [[s.base, s.group_step, s.block_step] for s in segments], dtype=np.int64
    ) - firsts[:, None] * [1, 0, 0]
    segment_of = np.repeat(np.arange(len(segments)), lengths).astype(np.uint8)
    return [
        source,
        result,
        packed,
        starts,
        flips,
        _on(segment_of, source.device),
        _on(places, source.device),
        np.int64(groups),
        np.int32(blocks),
        np.int32(len(moves.flips)),
        np.int64(head),
        np.int64(source.shape[1]),
        np.int32(source_step),
    ]


def _on(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # Pageable and small: copied before this returns, without waiting for the device.
    return torch.from_numpy(array).to(device, non_blocking=True)


def _by_torch(
    moves: Moves,
    source: torch.Tensor,
    head: int,
    result: torch.Tensor,
    segments: list[ByteRun],
    groups: int,
    blocks: int,
    source_step: int,
) -> None:
    body = source[:, head : head + blocks * source_step].reshape(groups * blocks, source_step)
    moved = torch.from_numpy(moves.flips).to(torch.int32).expand(len(body), -1).clone()
    for which, shift, mask in _rounds(_Key(moves)):
        moved ^= body[:, which].to(torch.int32) << shift >> 8 & mask
    moved, first = moved.to(torch.uint8).reshape(groups, blocks, -1), 0
    for s in segments:
        place = torch.as_strided(
            result,
            (groups, blocks, s.n_bytes),
            (s.group_step, s.block_step, 1),
            result.storage_offset() + s.base,
        )
        place.copy_(moved[..., first : first + s.n_bytes])
        first += s.n_bytes


class _Key:
    """Moves as a key of a cache: by identity, as they are made once per type."""

    def __init__(self, moves: Moves):
        self.moves = moves

    def __hash__(self) -> int:
        return id(self.moves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.moves is self.moves


@functools.cache
def _tables(key: _Key, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tables that the kernel reads: the moves in order of their targets, where those of
    each byte begin, the flips.
    """
    moves = key.moves
    order = np.argsort(moves.target, kind="stable")
    packed = (moves.source[order] << 16 | moves.shift[order] << 8 | moves.mask[order]).astype(
        np.uint32
    )
    starts = np.searchsorted(moves.target[order], np.arange(len(moves.flips) + 1)).astype(np.uint16)
    return (
        _on(packed.view(np.int32), device),
        _on(starts.view(np.int16), device),
        _on(moves.flips, device),
    )


@functools.cache
def _rounds(key: _Key) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return `Moves.rounds` as tensors: (byte to read, left shift + 8, mask) for all bytes."""
    rounds = []
    for table in key.moves.rounds():
        which, shift, mask = torch.from_numpy(table)
        rounds.append((which, shift.to(torch.int32), mask.to(torch.int32)))
    return rounds
