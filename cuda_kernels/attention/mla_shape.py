"""The shape of latent attention of a decoding step, for `attention/mla.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import UnsupportedTypeError
from ...formats.types import ggml_type
from ..compile.spec import KernelSpec
from .shape import TYPES, shared_limit

THREADS = 256
PAIRS = 16  # heads of new positions in a block
MOST_SPLITS = 256
TILE = 64  # positions in shared memory, or a half or a quarter of them
SHORTEST = 64  # the fewest positions of a block, a multiple of TILE
SHARES = 4  # of a score, by elements
TEAMS = 1  # of threads, which take turns with tiles
KEY_ROWS = 64  # rows of a head's matrix in a block
VALUE_ROWS = 16  # the fewest of them in a block of the last launch
CLUSTER = 8  # the most blocks of a head that join ranges together
MOST_ROWS = 8
_HALVES = {torch.bfloat16: 0, torch.float16: 1}
FUNCTIONS = ("latent_queries", "latent_attention", "latent_values")


@dataclass(frozen=True)
class LatentShape:
    """The shape that the kernels are compiled for. `rows` new positions; heads of `nope` + `rope`
    elements, values of `value`; `rank`: length of the latent vector. type: of the cache, by ggml
    name; half: of the matrices. temperature: (scale, original context). chosen: so many positions
    at most, of a list, are seen by a row; 0 for all. hadamard: rows of the cache are kept after a
    Hadamard transform in blocks of so many elements; 0 for none. warpgroup: attention by products
    of a warpgroup, for sm_90 alone.
    """

    rows: int
    heads: int
    nope: int
    rope: int
    rank: int
    value: int
    type: str
    half: torch.dtype
    neox: bool = False
    temperature: tuple[float, int] | None = None
    chosen: int = 0
    hadamard: int = 0
    warpgroup: bool = False

    def on(self, device: torch.device) -> LatentShape:
        """Return the shape with the products that are fastest on a device."""
        shape = replace(self, warpgroup=True)
        if (
            torch.cuda.get_device_capability(device) == (9, 0)
            and not self.decoded
            and not self.chosen
            and self.rope % 64 == self.rank % 64 == 0
            and shape.tile(shared_limit(device))[1] == 2
        ):
            return shape
        return self

    @property
    def width(self) -> int:
        """Elements of a row of the cache."""
        return self.rope + self.rank

    @property
    def decoded(self) -> bool:
        """Return whether rows of the cache are not in half precision. They are rounded to it in
        shared memory.
        """
        return self.type not in ("F16", "BF16")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the cache."""
        return ggml_type(self.type).row_bytes(self.width)

    @property
    def tiles(self) -> int:
        """Blocks of pairs."""
        return self.rows * self.row_tiles if self.chosen else -(-self.rows * self.heads // PAIRS)

    @property
    def row_tiles(self) -> int:
        """Blocks of the pairs of one row."""
        return -(-self.heads // PAIRS)

    @property
    def part_floats(self) -> int:
        """Return the floats of a range, as `PART` of the kernel."""
        return PAIRS * self.rank + 2 * PAIRS

    @property
    def value_rows(self) -> int:
        """Return the rows of a head's W_v in a block. Many heads make enough blocks."""
        blocks = max(2, min(CLUSTER, 256 // self.heads))
        return min(64, max(VALUE_ROWS, -(-self.value // blocks)))

    @property
    def value_blocks(self) -> int:
        """Return the blocks that share a head's W_v."""
        return -(-self.value // self.value_rows)

    @property
    def cluster(self) -> int:
        """Return how many blocks of a head join its ranges together: all or 1."""
        return self.value_blocks if self.rank % (4 * self.value_blocks) == 0 else 1

    def shared_bytes(self, tile: int, stages: int) -> int:
        """Return the bytes of shared memory, as `SHARED` of the kernel."""
        if self.warpgroup:
            halves = (stages * tile + 2 * PAIRS) * self.width + 2 * PAIRS * tile
            return 2 * halves + 2 * 4 * PAIRS * 4 + 2 * 8 * stages + 1024
        stride = 2 * self.width + 16
        probabilities = 2 * PAIRS * (2 * tile + 16)
        scores = SHARES * tile + 3  # with rescaling, maximum and sum
        if self.decoded:
            tiles = stages * (-(-tile * self.row_bytes // 16) * 16) + tile * stride
        else:
            tiles = stages * tile * stride
        of_team = tiles + 4 * PAIRS * scores + probabilities
        return 2 * PAIRS * stride + TEAMS * of_team

    def tile(self, limit: int) -> tuple[int, int]:
        """Return (positions, tiles in flight) of shared memory such that all of it stays below
        `limit` bytes; (0, 0) if nothing does.
        """
        for tile in (TILE, TILE // 2, TILE // 4):
            for stages in (2, 1):
                if self.shared_bytes(tile, stages) <= limit:
                    return tile, stages
        return 0, 0

    def spec(self, limit: int) -> KernelSpec:
        """Return the kernels. Raise UnsupportedTypeError if they do not fit `limit` bytes of shared
        memory per block.
        """
        tile, stages = self.tile(limit)
        if not tile:
            raise UnsupportedTypeError(
                f"latent attention with rows of {self.width} needs more than {limit} bytes of"
                " shared memory"
            )
        t, length = self.temperature or (0.0, 1)
        values = {
            "ROWS": self.rows,
            "HEADS": self.heads,
            "NOPE": self.nope,
            "ROPE": self.rope,
            "RANK": self.rank,
            "VALUE": self.value,
            "TYPE_K": TYPES[self.type],
            "TYPE_V": TYPES[self.type],
            "HALF": _HALVES[self.half],
            "NEOX_PAIRS": str(self.neox).lower(),
            "TEMPERATURE": repr(float(t)) if t else 0,
            "TEMPERATURE_LENGTH": length,
            "THREADS": THREADS,
            "SHARES": SHARES,
            "TEAMS": TEAMS,
            "TILE": tile,
            "STAGES": stages,
            "SHORTEST": SHORTEST,
            "MOST_SPLITS": MOST_SPLITS,
            "KEY_ROWS": KEY_ROWS,
            "VALUE_ROWS": self.value_rows,
            "CLUSTER": self.cluster,
            "CHOSEN": self.chosen,
            "HADAMARD": self.hadamard,
            "SHARED_BYTES": self.shared_bytes(tile, stages),
            "PART_FLOATS": self.part_floats,
            "WARPGROUP": int(self.warpgroup),
        }
        sizes = f"{self.heads}x{self.width}x{self.nope}x{self.rows}"
        sizes += f"_{self.chosen}" if self.chosen else ""
        sizes += f"_h{self.hadamard}" if self.hadamard else ""
        sizes += "_warpgroup" * self.warpgroup
        return KernelSpec(
            f"latent_{self.type}_{sizes}".lower(),
            ("attention/mla.cu",),
            tuple((key, str(value)) for key, value in values.items()),
            FUNCTIONS,
            ("sm_90a",) if self.warpgroup else (),
        )


def fits(shape: LatentShape, limit: int) -> bool:
    """Return whether there are kernels for the shape where a block has `limit` bytes of shared
    memory.
    """
    floats = ggml_type(shape.type).is_float
    kept = 4 * shape.width if shape.type == "F32" else 2 * shape.width + 16
    return (
        shape.type in TYPES
        and (floats or (shape.width % 32 == 0 and shape.row_bytes % 4 == 0))
        and shape.half in _HALVES
        and (not shape.hadamard or shape.rope % shape.hadamard == KEY_ROWS % shape.hadamard == 0)
        and shape.rows <= MOST_ROWS
        and shape.rope % 16 == shape.rank % 16 == shape.nope % 8 == 0
        and 4 * MOST_ROWS * max(shape.width, shape.nope) + 8 * kept <= 48 * 1024
        and shape.tile(limit)[0] > 0
    )
