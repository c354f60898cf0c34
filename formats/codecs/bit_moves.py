"""Interleaving as what it is: a map that moves every bit of K row blocks to its place in
one merged block.

A layout (`interleaved_*.py`) lists pairs of bit positions, (in the row block, in the merged block),
for every row k and element i. From these a table of moves is made, once per type: read a byte,
shift it, mask it, put it elsewhere. One compiled loop runs any table in either direction, so a
layout is data, and both directions come from the same data.

Two kinds of pairs are more than a move: `SIGN_CODE`, whose stored bits are running sums modulo 2 of
the row's bits (the eight signs are then `t ^ 2*t` and need no table), and `FLIPPED`, whose last bit
is inverted (codes around 8 become two's complement). Both are linear over bits, so a move adds
(xor) instead of writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..kernel import CompiledLoop

SIGN_CODE, FLIPPED = "sign code", "flipped"


def bits(at, first, count: int) -> np.ndarray:
    """Positions of `count` bits from bit `first` of byte `at` on; `at` and `first` broadcast, the
    bits become the last axis.
    """
    start = np.asarray(8 * at + first)
    return start[..., None] + np.arange(count)


def u8(at) -> np.ndarray:
    """Positions of the 8 bits of byte `at`: int64[..., 8]. See `bits`."""
    return bits(at, 0, 8)


def u16(at) -> np.ndarray:
    """Positions of the 16 bits of the little-endian word at byte `at`: int64[..., 16]. See
    `bits`.
    """
    return bits(at, 0, 16)


def nibble(at, half) -> np.ndarray:
    """Positions of 4 bits of byte `at`: the low nibble for half 0, the high one for half 1. See
    `bits`.
    """
    return bits(at, 4 * half, 4)


def n4(at, k, e) -> np.ndarray:
    """Pattern N4: nibbles of 32 elements of four rows in 64 bytes at `at`."""
    return nibble(at + 4 * k + e % 4 + 16 * (e // 16) + 32 * (e % 8 // 4), e % 16 // 8)


def c4(at, k, e) -> np.ndarray:
    """Pattern C4: pairs of bits of 32 elements of four rows in 32 bytes at `at`."""
    return bits(at + 4 * k + e % 4 + 16 * (e // 16), 2 * (e % 16 // 4), 2)


@dataclass(frozen=True)
class Moves:
    """Moves of bits: the source byte of each, the target byte, the left shift + 8, and the mask of
    the bits that arrive. `flips`: xor of each resulting byte.
    """

    source: np.ndarray
    target: np.ndarray
    shift: np.ndarray
    mask: np.ndarray
    flips: np.ndarray

    @classmethod
    def of_bits(
        cls, source: np.ndarray, target: np.ndarray, n_bytes: int, flipped: np.ndarray
    ) -> Moves:
        """Return the moves from pairs of bit positions and the positions that are inverted;
        `n_bytes` is the size of the result.
        """
        flips = np.zeros(n_bytes, dtype=np.uint8)
        np.bitwise_or.at(flips, flipped // 8, (1 << flipped % 8).astype(np.uint8))
        shift = target % 8 - source % 8 + 8
        key = (target // 8 * (source.max() // 8 + 1) + source // 8) * 16 + shift
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        mask = np.zeros(len(first), dtype=np.int64)
        np.bitwise_or.at(mask, inverse, 1 << target % 8)
        return cls(source[first] // 8, target[first] // 8, shift[first], mask, flips)

    def rounds(self) -> list[np.ndarray]:
        """The moves in rounds of at most one move to each byte: int64[3, bytes of the result],
        (byte to read, left shift + 8, mask).

        For who moves all bytes at once, as with torch: result ^= bytes[which] << shift >> 8 & mask,
        round after round, from `flips` on.
        """
        order = np.argsort(self.target, kind="stable")
        target = self.target[order]
        rank = np.arange(len(target)) - np.searchsorted(target, target)
        tables = []
        for n in range(rank.max() + 1):
            chosen = order[rank == n]
            table = np.zeros((3, len(self.flips)), dtype=np.int64)
            table[:, self.target[chosen]] = (
                self.source[chosen],
                self.shift[chosen],
                self.mask[chosen],
            )
            tables.append(table)
        return tables

    @property
    def whole_bytes(self) -> bool:
        """Return whether bytes only change places."""
        return bool((self.shift == 8).all() and (self.mask == 255).all()) and not self.flips.any()


class Interleaving:
    """Row blocks of `row_bytes` bytes from `group_rows` rows, to and from a merged block, as
    `layout(k, i)` lists the bits.
    """

    def __init__(
        self,
        layout: Callable[[np.ndarray, np.ndarray], Iterable[tuple]],
        group_rows: int,
        elements: int,
        row_bytes: int,
    ):
        self.group_rows, self.elements, self.row_bytes = group_rows, elements, row_bytes
        self.merged_bytes = group_rows * row_bytes
        k, i = np.arange(group_rows)[:, None], np.arange(elements)[None]
        copies, pack_sums, unpack_sums, row_flips, merged_flips = [], [], [], [], []
        for in_row, in_merged, *kind in layout(k, i):
            shape = np.broadcast_shapes(in_row.shape, in_merged.shape, (group_rows, 1, 1))
            row = np.broadcast_to(in_row + 8 * row_bytes * k[..., None], shape).reshape(
                -1, shape[-1]
            )
            merged = np.broadcast_to(in_merged, shape).reshape(-1, shape[-1])
            copies.append(np.stack([row.ravel(), merged.ravel()]))
            if kind == [SIGN_CODE]:
                n = shape[-1]
                pack_sums += [
                    np.stack([row[:, : n - s].ravel(), merged[:, s:].ravel()]) for s in range(1, n)
                ]
                unpack_sums.append(np.stack([row[:, 1:].ravel(), merged[:, :-1].ravel()]))
            elif kind == [FLIPPED]:
                row_flips.append(row[:, -1])
                merged_flips.append(merged[:, -1])
        # Elements that share a field name its bits more than once.
        pairs = np.unique(np.concatenate(copies, axis=1), axis=1)
        every_bit = np.arange(8 * self.merged_bytes)
        if not all(np.array_equal(np.sort(side), every_bit) for side in pairs):
            raise RuntimeError("a layout must have one place for every bit")
        none = [np.zeros(0, dtype=np.int64)]
        row, merged = np.concatenate([pairs, *pack_sums], axis=1)
        self.pack_moves = Moves.of_bits(
            row, merged, self.merged_bytes, np.concatenate(merged_flips or none)
        )
        row, merged = np.concatenate([pairs, *unpack_sums], axis=1)
        self.unpack_moves = Moves.of_bits(
            merged, row, self.merged_bytes, np.concatenate(row_flips or none)
        )

    def pack(self, rows: np.ndarray, row_head: int, merged: np.ndarray, merged_head: int) -> None:
        """Fill `merged` uint8[groups, bytes] after its first `merged_head` bytes from `rows`
        uint8[groups, K, bytes], each after its first `row_head` bytes. Both arrays are contiguous.
        """
        blocks = (merged.shape[1] - merged_head) // self.merged_bytes
        at = self._row_offsets(self.pack_moves.source, rows, row_head)
        moves = self.pack_moves
        if moves.whole_bytes:
            _copy(
                rows.reshape(len(rows), -1),
                merged,
                at,
                moves.target + merged_head,
                self.row_bytes,
                self.merged_bytes,
                blocks,
            )
            return
        merged[:, merged_head:].reshape(len(merged), blocks, -1)[...] = moves.flips
        run_moves(
            rows.reshape(len(rows), -1),
            merged,
            at,
            moves.target + merged_head,
            moves.shift,
            moves.mask,
            self.row_bytes,
            self.merged_bytes,
            blocks,
        )

    def unpack(self, merged: np.ndarray, merged_head: int, rows: np.ndarray, row_head: int) -> None:
        """Inverse of `pack`."""
        blocks = (merged.shape[1] - merged_head) // self.merged_bytes
        at = self._row_offsets(self.unpack_moves.target, rows, row_head)
        moves = self.unpack_moves
        if moves.whole_bytes:
            _copy(
                merged,
                rows.reshape(len(rows), -1),
                moves.source + merged_head,
                at,
                self.merged_bytes,
                self.row_bytes,
                blocks,
            )
            return
        flips = moves.flips.reshape(self.group_rows, 1, self.row_bytes)
        rows[..., row_head:].reshape(*rows.shape[:2], blocks, -1)[...] = flips
        run_moves(
            merged,
            rows.reshape(len(rows), -1),
            moves.source + merged_head,
            at,
            moves.shift,
            moves.mask,
            self.merged_bytes,
            self.row_bytes,
            blocks,
        )

    def _row_offsets(self, byte: np.ndarray, rows: np.ndarray, head: int) -> np.ndarray:
        """Return where the first block's bytes (row after row, as the moves count them) are in a
        group of whole rows.
        """
        return byte // self.row_bytes * rows.shape[2] + head + byte % self.row_bytes


def _copy(
    source: np.ndarray,
    target: np.ndarray,
    source_at: np.ndarray,
    target_at: np.ndarray,
    source_step: int,
    target_step: int,
    blocks: int,
) -> None:
    """Run moves of whole bytes, in the longest words in which all of them move together."""
    order = np.argsort(target_at)
    places = source_at[order], target_at[order]
    sizes = np.array([source_step, target_step, source.shape[1], target.shape[1]])
    for word in (8, 4, 2, 1):
        if len(order) % word or (sizes % word).any():
            continue
        runs = [at.reshape(-1, word) for at in places]
        if all(
            (run == run[:, :1] + np.arange(word)).all() and not (run[:, 0] % word).any()
            for run in runs
        ):
            kind = np.dtype(f"u{word}")
            copy_words(
                source.view(kind),
                target.view(kind),
                *(run[:, 0] // word for run in runs),
                *(sizes[:2] // word),
                blocks,
            )
            return


@CompiledLoop
def copy_words(source, target, source_at, target_at, source_step, target_step, blocks):
    """Copy words of every block between uint arrays [groups, words]: source word block*source_step
    + source_at[n] to target word block*target_step + target_at[n], for all n.
    """
    for group in range(source.shape[0]):
        for block in range(blocks):
            source_base, target_base = block * source_step, block * target_step
            for n in range(source_at.shape[0]):
                target[group, target_base + target_at[n]] = source[
                    group, source_base + source_at[n]
                ]


@CompiledLoop
def run_moves(source, target, source_at, target_at, shift, mask, source_step, target_step, blocks):
    """Run a table of moves over all blocks of all groups; `source` and `target` are uint8[groups,
    bytes].
    """
    for group in range(source.shape[0]):
        for block in range(blocks):
            source_base, target_base = block * source_step, block * target_step
            for n in range(source_at.shape[0]):
                moved = (
                    np.int64(source[group, source_base + source_at[n]]) << shift[n] >> 8
                ) & mask[n]
                target[group, target_base + target_at[n]] ^= np.uint8(moved)
