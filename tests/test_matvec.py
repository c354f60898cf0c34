"""Matrix-vector kernels against float64 on a GPU, and plans of products, without a GPU."""

from functools import partial

import pytest
import torch
from iqforge.cuda_kernels.common.gating import NO_TERMS, ExpertTerms, Gating
from iqforge.cuda_kernels.compile.grids import shared_bytes
from iqforge.cuda_kernels.compile.occupancy import RESERVED
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.matvec import experts as matvec_experts
from iqforge.cuda_kernels.matvec import operands
from iqforge.cuda_kernels.matvec import plan as matvec_plan
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.matvec import specs as matvec_specs
from iqforge.cuda_kernels.matvec.operands import RowRange
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.errors import ShapeError
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec

from . import matvec_reference as reference
from .matvec_launches import replace_launches
from .matvec_reference import EPS, normed, rounded, silu, weights

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TYPES = packed_types()
QUANTIZED = [name for name in TYPES if ggml_type(name).is_quantized]
# One format for all of them.
GENERIC = [name for name in QUANTIZED if name not in matvec_specs._OWN]
# With minimums, with a table in shared memory.
THOROUGH = [name for name in TYPES if name not in GENERIC] + [
    "Q5_1",
    "IQ2_XS",
]
matrix, draw = partial(reference.matrix, device="cuda"), partial(reference.draw, device="cuda")
# One activation in a million may be rounded in the other direction, as the norm's last bits differ.
assert_close = partial(reference.assert_close, most=1e-4)


def poison(*shape):
    return torch.full(shape, float("nan"), device="cuda")


def check_experts(name, merged, ff, width, spec=FFNSpec(), with_terms=False, up_type=None):
    """Two tokens, three slots, one of them not used. with_terms: experts have biases and scales.
    up_type: the type of up, if it is another one.
    """
    n, k = 2, 3
    gate, up = (
        matrix(name, 2 * ff if merged else ff, width, 5),
        (None if merged else matrix(up_type or name, ff, width, 5, seed=1)),
    )
    down, ids = (
        matrix(name, width, ff, 5, seed=2),
        torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32, device="cuda"),
    )
    h, w, by, out = (
        draw(n, width),
        draw(width, seed=2),
        draw(n, k, seed=3).abs(),
        poison(n, k, ff),
    )
    terms = [
        ExpertTerms(draw(5, m.rows, seed=6 + i), draw(5, seed=9 + i).abs())
        if with_terms
        else NO_TERMS
        for i, m in enumerate((down, gate, *([] if up is None else [up])))
    ]
    gating = Gating(spec.activation, spec.limit)
    arguments, skipping = (h, w, EPS, gate, up, ids), poison(n, k, ff)
    matvec_experts.expert_gate_up(*arguments, out, gating, *terms[1:])
    matvec_experts.expert_gate_up(*arguments, skipping, gating, *terms[1:], some_absent=True)
    assert torch.equal(out, skipping)
    x, chosen = normed(h, w, gate.type), ids.clamp(min=0).long()
    both = torch.einsum(
        "nc,nkrc->nkr",
        x,
        torch.cat([weights(gate)] + ([] if merged else [weights(up)]), dim=1)[chosen],
    )
    if with_terms:
        scales = [t.scale[chosen, None].expand(n, k, t.bias.shape[1]) for t in terms[1:]]
        both = both * torch.cat(scales, -1) + torch.cat([t.bias[chosen] for t in terms[1:]], -1)
    used = (ids >= 0)[..., None]
    assert_close(out, gated(spec, *both.clone().chunk(2, -1)) * used)
    y = torch.einsum("nkc,nkrc->nkr", rounded(out, down.type), weights(down)[chosen])
    if with_terms:
        y = y * terms[0].scale[chosen, None] + terms[0].bias[chosen]
    expected = h.double() + (y * by[..., None] * used).sum(1)
    for some_absent in (False, True):
        results = h.clone(), h.clone()
        arguments = out, down, ids, by
        for result in results:
            matvec_experts.expert_down_add(*arguments, result, terms[0], some_absent=some_absent)
        assert_close(results[0], expected)
        assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    "name, ff, slots, used",
    [
        *[(name, 1536, slots, 3) for name in ("IQ4_K", "Q4_K", "Q8_0") for slots in (1, 2)],
        ("IQ4_K", 512, 1, 8),
        ("IQ4_KS", 512, 1, 8),
        ("IQ2_XXS", 768, 2, 2),
        ("IQ4_NL", 1408, 2, 6),
        ("MXFP4", 2880, 1, 4),
        ("BF16", 512, 1, 8),
        ("F16", 1408, 2, 6),
    ],
)
def test_a_shared_expert_in_the_launches_of_the_others(name, ff, slots, used, merged):
    """The experts next to it have terms, which it does not."""
    n, width = 2, 512 if name == "MXFP4" else 768
    gate, up = (
        matrix(name, 2 * ff if merged else ff, width, 5),
        None if merged else matrix(name, ff, width, 5, seed=1),
    )
    rows = slots * ff
    shared = [matrix(name, rows * (1 + merged), width, seed=11)]
    shared += [] if merged else [matrix(name, rows, width, seed=12)]
    down, down_shared = matrix(name, width, ff, 5, seed=2), matrix(name, width, rows, seed=13)
    ids = torch.arange(n * used, dtype=torch.int32, device="cuda").view(n, used) % 5
    ids[1, 0] = -1
    h, w, by = draw(n, width), draw(width, seed=2), draw(n, used + slots, seed=3).abs()
    terms = [
        ExpertTerms(draw(5, m.rows, seed=6 + i), draw(5, seed=9 + i).abs())
        for i, m in enumerate((down, gate, *([] if up is None else [up])))
    ]
    out, alone = poison(n, used + slots, ff), poison(n, used, ff)
    gate_terms = [*terms[1:], *[NO_TERMS] * merged]
    arguments = h, w, EPS, gate, up, ids
    matvec_experts.expert_gate_up(*arguments, alone, Gating(), *gate_terms)
    matvec_experts.expert_gate_up(*arguments, out, Gating(), *gate_terms, shared)
    assert torch.equal(out[:, :used], alone)
    skipping = poison(*out.shape)
    matvec_experts.expert_gate_up(
        *arguments, skipping, Gating(), *gate_terms, shared, some_absent=True
    )
    assert torch.equal(out, skipping)
    other, apart = poison(n, used, ff), poison(n, rows)
    matvec_experts.expert_gate_up(*arguments, other, Gating(), *gate_terms, shared, apart)
    assert torch.equal(other, alone) and torch.equal(apart, out[:, used:].flatten(1))
    both = normed(h, w, gate.type) @ torch.cat([weights(m)[0] for m in shared]).T
    assert_close(out[:, used:].flatten(1), gated(FFNSpec(), *both.chunk(2, -1)))
    expected = h.clone()
    matvec_experts.expert_down_add(alone, down, ids, by[:, :used].contiguous(), expected, terms[0])
    x = (rounded(out, down.type) * by[..., None])[:, used:].flatten(1)
    expected = expected.double() + x @ weights(down_shared)[0].T
    for some_absent in (False, True):
        results = h.clone(), h.clone()
        for result in results:
            matvec_experts.expert_down_add(
                out, down, ids, by, result, terms[0], down_shared, some_absent=some_absent
            )
        assert_close(results[0], expected)
        assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "up_type"), [("MXFP4", "Q8_0"), ("IQ4_KS", "Q4_K"), ("BF16", "F16")]
)
def test_experts_of_two_types(name, up_type):
    check_experts(name, False, 512, 768, FFNSpec("swiglu_oai", limit=1.0), True, up_type)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("name", "activation", "limit", "terms"),
    [
        ("MXFP4", "swiglu_oai", 1.0, True),
        ("NVFP4", "silu", 0.0, True),
        ("IQ4_NL", "silu", 0.5, False),
        ("Q4_K", "capped_silu", 0.5, False),
        ("Q8_0", "gelu", 0.0, True),
        ("IQ4_K", "gelu_erf", 0.0, False),
        ("Q4_K", "swiglu_oai", 7.0, True),
        ("BF16", "swiglu_oai", 7.0, True),
    ],
)
def test_experts_with_terms(name, activation, limit, terms, merged):
    """Widths are those of gpt-oss, where blocks divide them."""
    block = ggml_type(name).block_size
    sizes = 2880 // block * block, 2880 // block * block
    check_experts(name, merged, *sizes, FFNSpec(activation, limit=limit), terms)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", GENERIC)
def test_generic_format(name, n):
    """Rows of at most three blocks of 256 make planes whose rows are not a multiple of 16 bytes.
    Some types multiply their codes in other ways with one row than with many.
    """
    m, x, h = matrix(name, 80, 768), draw(n, 768), draw(n, 80, seed=2)
    expected = h.double() + rounded(x, m.type) @ weights(m)[0].T
    matvec.matvec_add(x, m, h)
    assert_close(h, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GENERIC)
def test_generic_experts(name):
    """Rows that end within a step where blocks are short enough."""
    block = ggml_type(name).block_size
    check_experts(name, False, 1408 // block * block, 2880 // block * block)


@pytest.mark.parametrize("name", THOROUGH)
class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(("n", "cols"), [(1, 512), (1, 2816), (3, 1024), (8, 4096)])
    def test_norm_matvec(self, name, n, cols):
        """Three matrices share a launch, and a fourth of another type has its own. The number of
        rows is not a multiple of a block's.
        """
        ms = [matrix(name, rows, cols, seed=i) for i, rows in enumerate((133, 17, 64))] + [
            matrix("Q8_0", 40, cols)
        ]
        h, w, outs = 3 * draw(n, cols), draw(cols, seed=2), [poison(n, m.rows) for m in ms]
        matvec.norm_matvec(h, w, EPS, ms, outs)
        for m, out in zip(ms, outs, strict=True):
            assert_close(out, normed(h, w, m.type) @ weights(m)[0].T)
        matvec.plain_matvec(h, ms, outs)
        for m, out in zip(ms, outs, strict=True):
            assert_close(out, rounded(h, m.type) @ weights(m)[0].T)
        parts, found = [(5, 60), (65, 68)], [poison(n, 60), poison(n, 68)]
        matvec.norm_matvec(h, w, EPS, [RowRange(ms[0], *part) for part in parts], found)
        every = normed(h, w, ms[0].type) @ weights(ms[0])[0].T
        for (first, rows), out in zip(parts, found, strict=True):
            assert_close(out, every[:, first : first + rows])
        matvec.norm_matvec(h, None, EPS, ms[:1], outs[:1])
        assert_close(outs[0], normed(h, None, ms[0].type) @ weights(ms[0])[0].T)

    @pytest.mark.parametrize(("n", "cols"), [(1, 768), (1, 14336), (5, 1024)])
    def test_matvec_add(self, name, n, cols):
        m, x, h = matrix(name, 2200, cols), draw(n, cols), draw(n, 2200, seed=2)
        expected = h.double() + rounded(x, m.type) @ weights(m)[0].T
        matvec.matvec_add(x, m, h)
        assert_close(h, expected)
        bias = draw(2200, seed=3)
        matvec.matvec_add(x, m, h, bias)
        assert_close(h, expected + rounded(x, m.type) @ weights(m)[0].T + bias)

    @pytest.mark.parametrize(("n", "other"), [(1, None), (4, None), (1, "Q4_K")])
    def test_gate_up(self, name, n, other):
        """Gate and up are separate, merged, or of two types."""
        gate, up = matrix(name, 90, 1024), matrix(other or name, 90, 1024, seed=1)
        h, w, out = draw(n, 1024), draw(1024, seed=2), poison(n, 90)
        g, u = (normed(h, w, m.type) @ weights(m)[0].T for m in (gate, up))
        matvec.gate_up(h, w, EPS, gate, up, out)
        assert_close(out, silu(g) * u)
        y = normed(h, w, gate.type) @ weights(gate)[0].T
        matvec.gate_up(h, w, EPS, gate, None, merged := poison(n, 45))
        assert_close(merged, silu(y[:, :45]) * y[:, 45:])

    def test_bf16_in_between(self, name):
        gate, up, down = (
            matrix(name, 768, 1024, seed=0),
            matrix(name, 768, 1024, seed=1),
            matrix(name, 80, 768, seed=2),
        )
        h, w, out, half = (
            draw(1, 1024),
            draw(1024, seed=2),
            poison(1, 768),
            poison(1, 768).bfloat16(),
        )
        matvec.gate_up(h, w, EPS, gate, up, out)
        matvec.gate_up(h, w, EPS, gate, up, half)
        assert torch.equal(half, out.bfloat16())
        one, two = draw(1, 80, seed=3), draw(1, 80, seed=3)
        matvec.matvec_add(half, down, one)
        matvec.matvec_add(half.float(), down, two)
        assert torch.equal(one, two)

    @pytest.mark.parametrize("merged", [False, True])
    def test_experts(self, name, merged):
        check_experts(name, merged, 768, 512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_chain_repeats_bit_for_bit():
    """Products that depend on each other, in a graph with and without overlap, give the bits of
    single launches.
    """
    up, down = [matrix("IQ4_K", 1024, 512, seed=i) for i in range(2)], matrix("Q6_K", 512, 1024)
    w, start, hidden, h = draw(512), draw(1, 512, seed=2), poison(1, 1024), poison(1, 512)

    def steps(pdl):
        h.copy_(start)
        for _ in range(20):
            matvec.gate_up(h, w, EPS, *up, hidden, pdl=pdl)
            matvec.matvec_add(hidden, down, h, pdl=pdl)

    steps(False)
    expected = h.clone()
    for pdl in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps(pdl)
        for _ in range(5):
            h.fill_(0)
            graph.replay()
            assert torch.equal(h, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_does_not_fit_is_named():
    m, h = matrix("Q4_K", 64, 512), draw(1, 512)
    with pytest.raises(ShapeError, match="9 rows of activations, expected 1 to 8"):
        matvec.matvec_add(draw(9, 512), m, draw(9, 64))
    with pytest.raises(ShapeError, match=r"result: torch.float32\[1, 63\]"):
        matvec.norm_matvec(h, None, EPS, [m], [draw(1, 63)])
    with pytest.raises(ShapeError, match="rows of 512 elements"):
        matvec.matvec_add(draw(1, 256), m, draw(1, 64))
    with pytest.raises(ShapeError, match="ids of experts"):
        matvec_experts.expert_gate_up(
            h,
            None,
            EPS,
            m,
            None,
            torch.zeros(1, 33, dtype=torch.int32, device="cuda"),
            draw(1, 33, 32),
        )


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("cols", [512, 768, 2048, 2816, 4096, 8192, 11008, 14336, 28672])
def test_plans_cover_rows_and_fit(name, cols):
    """Steps cover a row and waste less than one step, and rings fit next to the activations into
    every architecture's shared memory.
    """
    type = ggml_type(name)
    for limit in (99 << 10, 163 << 10, 227 << 10):
        for kind in (
            matvec_plan.NORM_MATVEC,
            matvec_plan.MATVEC_ADD,
            matvec_plan.GATE_UP,
            matvec_plan.EXPERT_GATE_UP,
        ):
            cut = matvec_plan.plan(type, cols, 1, kind, limit)
            elements = 32 * matvec_plan.granule(type)
            assert (
                cols <= cut.steps * elements < cols + elements and 1 <= cut.stage_steps <= cut.steps
            )
            assert cut.slots >= 2 and cut.shared <= matvec_plan.shared_space_of(type, limit)


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_that_follow_each_other_fit_together(name):
    """On an H200, with the tables of types, the block of a product fits next to one that is alone
    on its multiprocessor, and two of those do not fit.
    """
    type, whole, system = ggml_type(name), 228 << 10, 1 << 10
    here = matvec_plan.DeviceLimits(132, 227 << 10, whole // 2, whole // 2 - RESERVED)

    def taken(kind, cols, n):
        cut = here.plan(type, cols, n, kind)
        return (
            here.shared_of(type, kind in matvec_plan.AFTER_FEW_BLOCKS, cut.shared)
            + shared_bytes(type)
            + system
        )

    for first, then in (
        ((matvec_plan.EXPERT_GATE_UP, 2048, 1), (matvec_plan.EXPERT_DOWN, 768, 8)),
        ((matvec_plan.MATVEC_ADD, 4096, 1), (matvec_plan.GATE_UP, 4096, 1)),
    ):
        assert taken(*first) + taken(*then) <= whole < 2 * taken(*first)


@pytest.mark.parametrize("name", [n for n in QUANTIZED if ggml_type(n).block_size == 256])
def test_slots_of_experts_are_joined(name):
    """Rows of 768 are three quarters of a step: eight of them take six steps, and no more shared
    memory than they have bytes. So the block fits next to one of the gates, and its weights load
    while those are multiplied. Rows of whole steps stay apart.
    """
    type, half = ggml_type(name), 114 << 10  # of an H200's multiprocessor
    cut = matvec_plan.plan(type, 768, 8, matvec_plan.EXPERT_DOWN, 227 << 10, half - (2 << 10))
    assert cut.joined == (matvec_plan.granule(type) == 32)
    assert cut.shared <= matvec_plan.shared_space_of(type, half)
    assert not matvec_plan.plan(type, 1024, 8, matvec_plan.EXPERT_DOWN, 227 << 10).joined


@pytest.mark.parametrize(
    ("name", "rows", "cols", "n", "slots"),
    [
        ("IQ4_K", 2048, 768, 8, 8),  # a row for each warp: all of it is on its way at once
        ("IQ4_K", 4096, 1536, 8, 2),
        ("Q8_0", 4096, 1536, 8, 4),
        ("IQ4_K", 7168, 2048, 9, 3),
        ("MXFP4", 2880, 2880, 4, 1),  # a row is two and a bit of stages, or one
        ("Q8_0", 2048, 1408, 6, 1),
    ],
)
def test_slots_of_experts_are_divided(name, rows, cols, n, slots):
    """Where a warp of an H200 has more stages than are on their way at once."""
    type, half = ggml_type(name), 114 << 10
    here = matvec_plan.DeviceLimits(132, 227 << 10, half - 896, half - RESERVED)
    cut = here.plan(type, cols, n, matvec_plan.EXPERT_DOWN, [rows])
    assert cut.stage_rows == slots
    assert cut.slots >= 2 or slots == n


def test_every_type_that_is_packed_has_kernels():
    assert all(operands.supported(ggml_type(name)) for name in TYPES)
    assert not operands.supported(ggml_type("I32"))


SHARED = 99 << 10  # bytes that a block can have, of the simulated device


def stand_in(monkeypatch) -> list[tuple]:
    """Replace launches. Record (the spec, the block's threads, rows of activations, bytes of shared
    memory) of each.
    """
    launches = []
    here = matvec_plan.DeviceLimits(84, SHARED, 50 << 10, 47 << 10)

    def launch(spec, grid, block, x, *args, shared, pdl):
        launches.append((spec, block, len(x), shared))

    replace_launches(monkeypatch, here, launch)
    return launches


@pytest.mark.parametrize("kind", ["matvec_add", "gate_up"])
@pytest.mark.parametrize(
    ("name", "cols"),
    [("Q4_0", 18432), ("IQ4_K", 28672), ("Q8_0", 4096), ("F32", 12672), ("BF16", 8448)],
)
def test_rows_in_parts_are_launched_as_compiled(monkeypatch, name, cols, kind):
    """Long rows of activations are split into parts, and the plan of the last one may differ from
    the others.
    """
    launches, type, limit, rows = stand_in(monkeypatch), ggml_type(name), SHARED, 64
    m = PackedMatrix(type, rows, cols, 1, torch.empty(0, dtype=torch.uint8))
    for n in range(1, 9):
        if kind == "matvec_add":
            matvec.matvec_add(torch.empty(n, cols), m, torch.empty(n, rows))
        else:
            matvec.gate_up(torch.empty(n, cols), None, EPS, m, m, torch.empty(n, rows))
        for spec, block, here, shared in launches:
            defines = dict(spec.defines)
            assert (block, here) == (32 * int(defines["WARPS"]), int(defines["X_ROWS"]))
            assert shared + 1024 <= limit  # what the system takes
        assert sum(here for _, _, here, _ in launches) == n
        launches.clear()
    huge = PackedMatrix(type, rows, 1 << 18, 1, m.data)
    with pytest.raises(ShapeError, match="activations of 262144 elements do not fit"):
        matvec.matvec_add(torch.empty(1, huge.cols), huge, torch.empty(1, rows))


def test_the_longest_rows_where_a_block_has_99_kb(monkeypatch):
    """Those of docs/guide/gpu.md."""
    stand_in(monkeypatch)
    none = torch.empty(0, dtype=torch.uint8)

    def longest(name: str) -> int:
        kinds = matvec_plan.NORM_MATVEC, matvec_plan.MATVEC_ADD, matvec_plan.GATE_UP
        for cols in range(20480, 65536, 256):
            m = PackedMatrix(ggml_type(name), 64, cols, 1, none)
            if not all(operands.fits(m, kind) for kind in kinds):
                return cols - 256
        return 65536

    assert {name: longest(name) for name in ("F32", "F16", "BF16")} == dict.fromkeys(
        ("F32", "F16", "BF16"), 23808
    )
    rows = {name: longest(name) for name in QUANTIZED}
    assert rows.pop("IQ3_KT") == 37888 and min(rows.values()) == 59392

    def longest_of_experts(name: str, used: int) -> int:
        down = matvec_plan.EXPERT_DOWN
        for cols in range(256, 65536, 256):
            m = PackedMatrix(ggml_type(name), 4096, cols, used, none)
            if not operands.fits(m, down, used):
                return cols - 256
        return 65536

    for name in ("F32", "F16", "BF16"):
        assert [longest_of_experts(name, used) for used in (8, 2)] == [2816, 12032]


def test_experts_that_do_not_fit_are_named(monkeypatch):
    """An error names them before a launch fails."""
    launches, none = stand_in(monkeypatch), torch.empty(0, dtype=torch.uint8)
    ids, by = torch.zeros(1, 2, dtype=torch.int32), torch.empty(1, 2)

    def experts(cols: int) -> None:
        gate, down = (
            PackedMatrix(ggml_type("Q8_0"), 64, cols, 4, none),
            PackedMatrix(ggml_type("Q8_0"), 64, 256, 4, none),
        )
        matvec_experts.expert_gate_up(
            torch.empty(1, cols), None, EPS, gate, gate, ids, torch.empty(1, 2, 64)
        )
        matvec_experts.expert_down_add(torch.empty(1, 2, 256), down, ids, by, torch.empty(1, 64))

    experts(4096)
    assert len(launches) == 2 and all(shared + 1024 <= SHARED for *_, shared in launches)
    with pytest.raises(ShapeError, match="activations of 262144 elements do not fit"):
        experts(1 << 18)
    long = PackedMatrix(ggml_type("Q8_0"), 64, 1 << 18, 4, none)
    with pytest.raises(ShapeError, match="2 experts of 262144 elements do not fit"):
        matvec_experts.expert_down_add(
            torch.empty(1, 2, long.cols), long, ids, by, torch.empty(1, 64)
        )
    assert len(launches) == 2
