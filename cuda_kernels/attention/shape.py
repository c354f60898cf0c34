"""Attention of a decoding step: `attention/attention.cu` for one shape, and its splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import UnsupportedTypeError
from ...formats.types import ggml_type
from ..compile.occupancy import RESERVED
from ..compile.spec import KernelSpec

WARPS = 8  # of a block
_FEWER_WARPS = 6  # that take their own tiles, where two of each of `WARPS` do not fit
MOST_HEAD = 512  # elements of a head
CACHE_TILE = 16  # positions whose encoded rows stand together, as in attention/cache.cuh
TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 2,
    "Q8_0": 3,
    "Q6_0": 4,
    "Q5_1": 5,
    "Q5_0": 6,
    "Q4_1": 7,
    "Q4_0": 8,
    "IQ4_NL": 9,
    "Q8_KV": 10,
}


@dataclass(frozen=True)
class AttentionShape:
    """The shape that the kernel is compiled for. `rows` new positions, `group` query heads per kv
    head, cache types by ggml name.
    """

    rows: int
    group: int
    kv_heads: int
    key_length: int
    value_length: int
    type_k: str
    type_v: str
    n_rot: int
    neox: bool
    head_norms: bool = False
    hadamard_k: int = 0  # block of the transform, 0 without
    hadamard_v: int = 0
    shortest: int = 128  # the fewest positions of a block
    tile_size: int = 128  # positions in shared memory at a time on tensor cores, where they fit
    stages: int = 1  # such tiles in flight
    blocks: int = 2  # of each multiprocessor, which share the longest sequences
    biases: bool = False  # of the projections
    value_norm: bool = False
    gate: bool = False  # q has a gate after every head, for its result
    gate_apart: bool = False  # gates are not in q
    head_gates: bool = False  # one for all elements of a head, not in q
    softplus_gates: bool = False  # results are multiplied by the softplus of gates, not the sigmoid
    sinks: bool = False
    window: int = 0  # positions that a token sees; 0: all
    chunked: bool = False  # a token sees those from the last multiple of the window on
    softcap: float = 0.0  # of scores; 0: none
    temperature: tuple[float, int, int] | None = None  # `specs.Temperature` of the runtime
    own_kv: bool = True  # False: another layer has stored the new rows of the cache
    scalar: bool = False  # without tensor cores
    short: bool = False  # then tiles may have fewer than 32 positions
    by_warp: bool = True  # every warp takes its own tiles, where the shape allows it
    warps: int = WARPS  # of a block; another number only by warp
    warp_tile: int = 16  # positions that a warp takes at a time
    warp_stages: int = 3  # such tiles in flight for each warp, at most
    warp_blocks: int = 1  # `blocks` by warp
    norms_last: bool = False  # head norms follow the rotation
    deep: bool = True  # contexts for which few warps with their own tiles pay, as against sharing

    @property
    def on_tensor_cores(self) -> bool:
        """Return whether scores and mixes are products of tensor cores."""
        types = {self.type_k, self.type_v}
        alike = types in ({"F16"}, {"BF16"}) or self.decoded
        return not self.scalar and ((alike and self._fits_fragments) or self.is_by_warp)

    @property
    def _fits_fragments(self) -> bool:
        return self.key_length % 16 == self.value_length % 16 == 0

    @property
    def decoded(self) -> bool:
        """Whether both keys and values are encoded. On tensor cores they are rounded to float16."""
        return not {self.type_k, self.type_v} & {"F32", "F16", "BF16"}

    @property
    def is_by_warp(self) -> bool:
        """Whether a warp can hold the queries and mixes of the shape (`attention/warps.cuh`), and
        copy rows in whole words. Encoded keys can have values in F16, and the reverse.
        """
        rows, types = self.rows * self.group, {self.type_k, self.type_v}
        return (
            self.by_warp
            and not self.scalar
            and (types == {"BF16"} or not types & {"F32", "BF16"})
            and self._fits_fragments
            and rows <= 16
            and max(self.key_length, self.value_length) * (2 if rows > 8 else 1) <= 256
            and all(row % 4 == 0 for row in self.row_bytes())
        )

    def row_bytes(self) -> tuple[int, int]:
        """Return the bytes of a K row and of a V row in the cache."""
        sizes = (self.type_k, self.key_length), (self.type_v, self.value_length)
        k, v = (ggml_type(type).row_bytes(n) for type, n in sizes)
        return k, v

    def tile(self, limit: int) -> tuple[int, int]:
        """Return (positions, tiles in flight) of shared memory such that all of it stays below
        `limit` bytes; (0, 0) if nothing does.
        """
        if self.is_by_warp:
            wanted = [(self.warp_tile, n) for n in range(self.warp_stages, 0, -1)]
            return next((way for way in wanted if self.shared_bytes(*way) <= limit), (0, 0))
        copied = self.on_tensor_cores or all(
            t in ("F32", "F16", "BF16") for t in (self.type_k, self.type_v)
        )
        wide = [(self.tile_size, self.stages)] if self.on_tensor_cores else []
        for tile, stages in (
            *wide,
            (64, 2 if copied else 1),
            (64, 1),
            *([] if self.on_tensor_cores else [(32, 1)]),
            *([(16, 1), (8, 1)] if self.short else []),
        ):
            if self.shared_bytes(tile, stages) <= limit:
                return tile, stages
        return 0, 0

    def fitting(self, limit: int) -> AttentionShape:
        """Return the shape, or the form of it that needs less shared memory: fewer warps, warps
        that share tiles, the scalar form for encoded rows, or that with short tiles.
        """
        shape, least = self, min(2, self.warp_stages)
        if shape.is_by_warp and shape.tile(limit)[1] < least:
            fewer = replace(shape, warps=min(shape.warps, _FEWER_WARPS))
            shared = replace(shape, by_warp=False, warps=WARPS)
            shape = fewer if self.deep and fewer.tile(limit)[1] >= least else shared
        if not shape.tile(limit)[0] and shape.decoded:
            shape = replace(shape, scalar=True)
        return shape if shape.tile(limit)[0] else replace(shape, scalar=True, short=True)

    def of_range(self, n: int) -> AttentionShape:
        """Return the shape with no more tiles in flight than a range of `n` positions has for each
        warp: the next kernel begins earlier where it finds shared memory.
        """
        tiles = -(-max(n, self.shortest) // (self.warps * self.warp_tile))
        return replace(self, warp_stages=min(self.warp_stages, tiles))

    def strides(self) -> tuple[int, int]:
        """Return the bytes of a K row and of a V row in a tile."""
        k, v = (
            (2 if self.on_tensor_cores or t in ("F16", "BF16") else 4)
            for t in (self.type_k, self.type_v)
        )
        return self.key_length * k + 16, self.value_length * v + 16

    def ring_rows(self) -> tuple[int, int]:
        """Return the bytes of a K row and of a V row in the ring of a warp, as `InRing` of the
        kernel.
        """
        types, lengths = (self.type_k, self.type_v), (self.key_length, self.value_length)
        k, v = (
            row if type in ("Q8_0", "Q8_KV") and n % 128 == 0 else _padded(row)
            for row, type, n in zip(self.row_bytes(), types, lengths, strict=True)
        )
        return k, v

    def shared_bytes(self, tile: int, stages: int) -> int:
        """Return the bytes of shared memory, as `SHARED` of the kernel."""
        r, dk, dv = self.rows * self.group, self.key_length, self.value_length
        if self.is_by_warp:
            padded, blocks, sums = -(-r // 8) * 8, dk // 32, 0
            coded = self.type_k not in ("F32", "F16", "BF16")
            if coded:
                # Units of queries, and the sums of their blocks for minima.
                sums = 4 * padded * (1 + (blocks if self.type_k in ("Q4_1", "Q5_1") else 0))
            kept = 2 * padded * (dk + 32 if coded else 2 * dk + 16)
            kept += self.rows * sum(map(_padded, self.row_bytes()))
            kept += 4 * self.warps * max(dk, dv, 2 * padded) + sums
            return self._tile_bytes(tile, stages) + kept
        if self.on_tensor_cores:
            padded = -(-r // 16) * 16
            queries, probabilities = 2 * padded * (2 * dk + 16), 2 * padded * (2 * tile + 16)
        else:
            queries, probabilities = 4 * r * dk, 4 * tile * (-(-r // 4) * 4 + 4)
        new, scores = self.rows * sum(self.strides()), 4 * max(r * tile, WARPS * max(dk, dv))
        return self._tile_bytes(tile, stages) + queries + new + scores + probabilities + 12 * r

    def _tile_bytes(self, tile: int, stages: int) -> int:
        """Return the bytes of the tiles, as `TILES` of the kernel: the tiles, or what is joined in
        their place.
        """
        r, dv = self.rows * self.group, self.value_length
        if self.is_by_warp:
            joined = 4 * r * (self.warps * _joined_row(dv) + (dv if self.hadamard_v else 0))
            return max(self.warps * stages * tile * sum(self.ring_rows()), joined)
        groups = 32 * WARPS // (dv // 4)
        parts = (
            (1 if self.hadamard_v else 0)
            if self.on_tensor_cores
            else groups // min(-(-r // 8), groups)
        )
        whole = tile * sum(self.strides())
        loaded = stages * whole
        if self.on_tensor_cores and self.decoded:
            loaded = stages * tile * sum(self.row_bytes()) + whole
        return max(loaded, 4 * parts * r * dv)

    def most_splits(self, tile: int, stages: int) -> int:
        """Return how many splits fit after the tiles in the block that joins them, where warps do
        not take their own tiles.
        """
        r = self.rows * self.group
        return (self.shared_bytes(tile, stages) - self._tile_bytes(tile, stages) - 12 * r) // (
            4 * r
        )

    @property
    def part_floats(self) -> int:
        """Return the floats of a part, as `PART` of the kernel."""
        r = self.rows * self.group
        chunks = -(-self.value_length // 128) if self.is_by_warp else 1
        return r * self.value_length + -(-2 * r * chunks // 4) * 4

    def defines(self, tile: int, stages: int) -> tuple[tuple[str, str], ...]:
        """Return the macros of attention/attention.cu for tiles of so many positions."""
        values = {
            "ROWS": self.rows,
            "GROUP": self.group,
            "HEADS_KV": self.kv_heads,
            "DK": self.key_length,
            "DV": self.value_length,
            "TYPE_K": TYPES[self.type_k],
            "TYPE_V": TYPES[self.type_v],
            "N_ROT": self.n_rot,
            "NEOX_PAIRS": str(self.neox).lower(),
            "HEAD_NORMS": int(self.head_norms) * (2 if self.norms_last else 1),
            "MMA": int(self.on_tensor_cores),
            "BY_WARP": int(self.is_by_warp),
            "WARPS": self.warps if self.is_by_warp else WARPS,
            "RESIDENT": self.warp_blocks if self.is_by_warp else 1,
            "HAD_K": self.hadamard_k,
            "HAD_V": self.hadamard_v,
            "TILE": tile,
            "STAGES": stages,
            "SHORTEST": self.shortest,
            "SHARED_BYTES": self.shared_bytes(tile, stages),
            "PART_FLOATS": self.part_floats,
            "BIASES": int(self.biases),
            "VALUE_NORM": int(self.value_norm),
            "GATE": int(self.gate) * (3 if self.head_gates else 2 if self.gate_apart else 1),
            "SOFTPLUS": int(self.softplus_gates),
            "SINKS": int(self.sinks),
            "WINDOW": self.window,
            "CHUNKED": int(self.chunked),
            "SOFTCAP": float(self.softcap),
            "TEMPERATURE": float(self.temperature[0]) if self.temperature else 0,
            "TEMPERATURE_LENGTH": self.temperature[1] if self.temperature else 1,
            "TEMPERATURE_OFFSET": self.temperature[2] if self.temperature else 0,
            "OWN_KV": int(self.own_kv),
        }
        return tuple((key, str(value)) for key, value in values.items())

    def spec(self, limit: int) -> KernelSpec:
        """Return the kernel. Raise UnsupportedTypeError if it does not fit `limit` bytes of shared
        memory per block.
        """
        tile, stages = self.tile(limit)
        if not tile:
            raise UnsupportedTypeError(
                f"attention of {self.rows} rows of {self.group} heads of {self.key_length} needs"
                f" more than {limit} bytes of shared memory"
            )
        shape = f"{self.key_length}x{self.group}x{self.rows}"
        name = f"attention_{self.type_k}_{self.type_v}_{shape}".lower()
        return KernelSpec(
            name, ("attention/attention.cu",), self.defines(tile, stages), ("attention",)
        )


def _padded(row: int) -> int:
    """Return the bytes from a row that stands alone in shared memory to the next one."""
    return 16 * (-(-row // 16) | 1)


def _joined_row(length: int) -> int:
    """Return the floats of a row that warps join, as `Mixer::JOINED` of the kernel."""
    return (length + length // 16 + 11) // 16 * 16 + 4


def shared_limit(device: torch.device) -> int:
    """Return how many bytes of shared memory a block of the kernel can have on a device."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - RESERVED


def fits(shape: AttentionShape, limit: int) -> bool:
    """Return whether there is a kernel for the shape where a block has `limit` bytes of shared
    memory: for one of its rows at least.
    """
    known = shape.type_k in TYPES and shape.type_v in TYPES
    sizes = (
        shape.key_length % 8 == shape.value_length % 8 == 0
        and max(shape.key_length, shape.value_length) <= MOST_HEAD
    )
    return known and sizes and replace(shape, rows=1).fitting(limit).tile(limit)[0] > 0
