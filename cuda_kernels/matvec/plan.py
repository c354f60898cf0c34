"""Plan how a matrix-vector product is divided among warps and stages, from shapes and device alone,
and return the kernel spec of each plan. See matvec/feed.cuh.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ...formats.types import GGMLType
from ..compile.grids import shared_bytes
from ..compile.occupancy import Occupancy, occupancy
from ..layouts.table import packed_layout, signed_type, spread_type
from .sizes import activation_bytes, granule, shared_space_of, stage_bytes

NORM_MATVEC, MATVEC_ADD, GATE_UP, GATE_BY = range(4)  # KIND of matvec/matvec.cu
# KIND of matvec/experts.cu, 4 less.
EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_GATE, EXPERT_GATE_BY = range(4, 8)
AFTER_FEW_BLOCKS = (MATVEC_ADD, EXPERT_GATE_UP, EXPERT_GATE)
NAMES = (
    *("norm_matvec", "matvec_add", "gate_up", "gate_by"),
    *("expert_gate_up", "expert_down", "expert_gate", "expert_gate_by"),
)
MOST_ROWS = 8  # of activations
MOST_SLOTS = 32  # experts of a token
_MOST_NEGATED = 2  # rows of activations
_MOST_SPREAD = 68 << 10  # bytes of activations that are in four bytes each: the ring needs the rest
# Bytes of weights on their way to a multiprocessor: 23 KB hide the latency of memory, the rest the
# gap between kernels.
_RING = 80 << 10
_LARGEST_RING = 110 << 10  # for long stages, and for experts; two blocks still fit on an H200
_WARPS = 16
# Of a block whose activations leave no room for more rings: of one token, and of several.
_FEWEST_WARPS, _FEWEST_WARPS_OF_SEVERAL = 2, 4
_WHOLE_STEPS = 3  # rows of so many steps are one stage
_DOWN_AHEAD = 2
_STAGE_STEPS = 2
_MORE_STAGE_STEPS = 4  # of types with few bytes for as much arithmetic
_FEW_BITS = 2.6  # per weight
_MOST_POINTERS = 6
# Gates of experts keep pointers where a row has so many stages: the next row is another expert's.
_GATES_ADVANCE_FROM = 2
# Types with so much arithmetic that its registers are worth more than the pointers kept in them.
_POINTERLESS = ("IQ3_KT", "IQ3_S", "IQ3_XXS", "IQ5_K", "IQ5_KS", "IQ6_K")
# Types whose kernels read activations in shared memory for as long as they compute: two rows of
# weights share what is read, if the matrix has enough of them.
_PAIRED = (
    *("Q1_0_G128", "Q2_0", "TQ2_0", "IQ2_BN", "Q2_K", "IQ1_S", "IQ1_S_R4"),
    *("IQ2_KT", "IQ4_KT", "IQ3_S", "IQ3_XXS", "IQ3_KS", "IQ4_KSS", "Q4_0"),
    *("Q8_K_R8", "Q8_K_R16"),
)
# Kinds with one row of weights in a stage, where it is no pair.
SINGLE_ROW = (NORM_MATVEC, MATVEC_ADD, GATE_BY)


@dataclass(frozen=True)
class MatvecPlan:
    """`steps` of 32 granules make a row. A stage is `stage_steps` of them of `stage_rows` rows.
    Each of `warps` warps has `slots` stages in flight. `shared`: bytes of shared memory of a block.
    `resident`: blocks whose registers fit on a multiprocessor at once. `spread`: each activation is
    in four bytes. `negated`: it is there negated, too. `joined`: lanes take the granules of all
    slots of an expert as one row. `advances`: pointers to weights are kept from stage to stage.
    """

    steps: int
    stage_steps: int
    stage_rows: int
    slots: int
    warps: int
    shared: int
    resident: int
    spread: bool = False
    negated: bool = False
    joined: bool = False
    advances: bool = False

    def holds(self, rows: int, blocks: int) -> bool:
        """Return whether so many rows are all in flight at once, in the warps of so many blocks."""
        items = -(-rows // (self.stage_rows * blocks * self.warps))
        return items * -(-self.steps // self.stage_steps) <= self.slots


@functools.cache
def plan(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    limit: int,
    wanted: int | None = None,
    pairs: bool = False,
    block_rows: int = 0,
) -> MatvecPlan:
    """Return the plan for rows of `cols` weights and n rows of activations (of EXPERT_DOWN: n
    slots), on a device that has `limit` bytes of shared memory for a block; the ring uses `wanted`
    bytes where that is less. `shared` is larger than the limit where n is too much. pairs: a warp
    works on two rows of weights at once. block_rows: rows of a block of EXPERT_DOWN; with that the
    slots of a row may be divided among warps.
    """
    cut = functools.partial(cut_in_parts, type, cols, n, kind, limit, wanted, pairs, block_rows)
    if kind != EXPERT_DOWN or not block_rows:
        return cut(1)
    whole = cut(1)
    stages = -(-block_rows // whole.warps) * -(-whole.steps // whole.stage_steps)
    if stages <= whole.slots:  # all stages of a warp are on their way from the beginning
        return whole

    # Short stages, so that two or more of a warp are on their way: as long as they can be then,
    # each with several slots, and equally long (docs/benchmarks/cuda-history/products.md).
    ahead = [
        divided
        for parts in range(1, n + 1)
        if n % parts == 0 and (divided := cut(parts)).slots > 1 and divided.shared <= limit
    ]

    def is_even(divided: MatvecPlan) -> bool:
        stage = divided.stage_steps * 32 * granule(type)
        return divided.stage_steps == divided.steps or cols % stage == 0

    even = [divided for divided in ahead if is_even(divided)]
    several = [divided for divided in even if divided.stage_rows > 1]
    many = [divided for divided in ahead if divided.slots > 2]
    return next(iter(several or even or many or ahead), whole)


def cut_in_parts(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    limit: int,
    wanted: int | None,
    pairs: bool,
    block_rows: int,
    parts: int,
) -> MatvecPlan:
    """Return the plan in which EXPERT_DOWN divides the slots of a row into so many `parts`."""
    steps = -(-cols // (32 * granule(type)))
    spread = (
        spread_type(type)
        and (n == 1 or kind == EXPERT_DOWN)
        and n * activation_bytes(type, steps, True) <= _MOST_SPREAD
    )
    # One row of weights is multiplied once or twice: `USES` of matvec/formats.cuh.
    negated = signed_type(type) and (n <= _MOST_NEGATED or kind >= EXPERT_GATE_UP)
    stage_rows = 2 if pairs else _stage_rows(type, n, kind) // parts
    sums = 4 * parts * block_rows if parts > 1 else 0
    x, fewest = (
        n * activation_bytes(type, steps, spread, negated) + sums,
        1 if kind == EXPERT_DOWN else 2,
    )
    ring = min(
        _LARGEST_RING if kind >= EXPERT_GATE_UP else _RING,
        shared_space_of(type, min(limit, wanted or limit)) - x,
    )

    # Lanes keep their place in a block of 256. Joined rows are one stage.
    joinable = kind == EXPERT_DOWN and granule(type) == 32 and cols % 256 == 0 and cols % 1024 != 0

    def slot(k: int) -> int:
        return stage_rows * stage_bytes(type, cols, k, joinable and k == steps)

    one = n == 1 or kind == EXPERT_DOWN
    warps, fewest_warps = _WARPS, _FEWEST_WARPS if one else _FEWEST_WARPS_OF_SEVERAL
    while warps > fewest_warps and fewest * warps * slot(1) > shared_space_of(type, limit) - x:
        warps //= 2
    few = granule(type) == 32 and 8 * type.block_bytes < _FEW_BITS * type.block_size
    wanted_steps = _MORE_STAGE_STEPS if few else _STAGE_STEPS
    if steps == _WHOLE_STEPS and (n == 1 or kind >= EXPERT_GATE_UP):
        wanted_steps = steps
    most = min(_LARGEST_RING, shared_space_of(type, min(limit, wanted or limit)) - x)

    def fitting(ahead: int) -> int:
        lengths = range(min(wanted_steps, steps), 0, -1)
        return next((k for k in lengths if ahead * slot(k) <= most // warps), 0)

    # Of experts' rows two short stages rather than one long stage.
    longest = (fitting(_DOWN_AHEAD) if kind == EXPERT_DOWN else 0) or fitting(fewest) or 1
    even = next(k for k in range(longest, 0, -1) if steps % k == 0)
    # Equal stages, if they need not be much shorter.
    stage_steps = even if 3 * even >= 2 * longest else -(-steps // -(-steps // longest))
    slots = max(fewest, min(8, ring // (warps * slot(stage_steps))))
    return MatvecPlan(
        steps,
        stage_steps,
        stage_rows,
        slots,
        warps,
        x + warps * slots * slot(stage_steps),
        2 if n == 1 or kind == EXPERT_DOWN else 1,  # blocks whose registers fit
        spread,
        negated,
        joinable and stage_steps == steps,
        parts == 1 and _advances(type, stage_rows, kind, steps, stage_steps),
    )


def _stage_rows(type: GGMLType, n: int, kind: int) -> int:
    """Return how many rows of weights a warp works on at once."""
    return {GATE_UP: 2, EXPERT_GATE_UP: 2, EXPERT_DOWN: n}.get(kind, 1)


def _advances(type: GGMLType, stage_rows: int, kind: int, steps: int, stage_steps: int) -> bool:
    """Return whether pointers advance from stage to stage: fewer instructions where a stage has
    few pieces, and more registers.
    """
    if type.name in _POINTERLESS:
        return False
    gates = (EXPERT_GATE_UP, EXPERT_GATE, EXPERT_GATE_BY)
    if kind in gates and -(-steps // stage_steps) < _GATES_ADVANCE_FROM:
        return False
    planes = packed_layout(type).planes
    return stage_rows * sum(not per_row for _, _, per_row in planes) <= _MOST_POINTERS


@dataclass(frozen=True)
class DeviceLimits(Occupancy):
    """Limits of a device for products."""

    def shared_of(self, type: GGMLType, after_few: bool, planned: int) -> int:
        """Return the bytes of shared memory to launch with where so many are planned, next to the
        table of the type. after_few: the launch before may have few blocks.

        Each block of a product is to be on a multiprocessor before the block in front of it has
        ended there, so that its first weights load meanwhile, and all multiprocessors are to have
        one block: where some have two and others none, everything waits for those. In a chain of
        kernels with a block everywhere it comes out so by itself, as two blocks fit and not three.
        What follows attention, a router, or a launch that rounds activations, whose blocks are
        here and there, has to be alone.
        """
        alone = self.alone - shared_bytes(type) if after_few else 0
        return max(planned, alone)

    def plan(
        self, type: GGMLType, cols: int, n: int, kind: int, rows: Sequence[int] = ()
    ) -> MatvecPlan:
        """Return the plan for matrices of so many `rows` each, with pairs of rows only where these
        fit.
        """
        wanted = self.alone if kind in AFTER_FEW_BLOCKS else self.beside
        block_rows = -(-sum(rows) // self.processors) if kind == EXPERT_DOWN else 0
        if type.name in _PAIRED and n == 1 and kind in SINGLE_ROW and self._has_pairs(rows):
            pairs = plan(type, cols, n, kind, self.shared, wanted, True)
            if pairs.shared <= shared_space_of(type, self.shared):
                return pairs
        return plan(type, cols, n, kind, self.shared, wanted, False, block_rows)

    def _has_pairs(self, rows: Sequence[int]) -> bool:
        """Return whether no warp has more rows if it takes two at a time."""
        total, warps = sum(rows), self.processors * _WARPS
        fair = 2 * -(-total // (2 * warps)) <= -(-total // warps)
        return total > 0 and fair and all(n % 2 == 0 for n in rows)


@functools.cache
def limits(device: int) -> DeviceLimits:
    """Return the limits of a CUDA device, by number."""
    return DeviceLimits(**vars(occupancy(device)))
