"""Grouped products with packed weights: they compile for their architecture, and agree with float64
on such a device.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.common.gating import ExpertTerms, Gating
from iqforge.cuda_kernels.compile.grids import shared_bytes
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.cuda_kernels.prompt import grouped as prompt_grouped
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import PlacedBranch
from iqforge.runtime.cuda.prompt import moe as prompt_moe
from iqforge.runtime.layers.block import Branch
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.moe import Experts, MoE, Router
from iqforge.runtime.layers.specs import FFNSpec, RouterSpec
from torch.nn import functional as F

from .permuted_columns import permutation

HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and importlib.util.find_spec("cuda") is not None
)


def packed(type: str, n_experts: int, rows: int, cols: int, seed: int) -> PackedMatrix:
    rng = np.random.default_rng(seed)
    blocks = random_rows(type, 64, cols, 1.0, rng)[rng.integers(0, 64, n_experts * rows)]
    return pack_matrix(type, [blocks], rows, cols, n_experts, "cuda")


def reference(
    m: PackedMatrix, x: torch.Tensor, counts: list[int], half: torch.dtype
) -> torch.Tensor:
    """Return float64[rows, m.rows] of rows grouped by expert."""
    w = decode_matrix(m, half).view(m.n_matrices, m.rows, m.cols)
    return torch.cat(
        [
            x[sum(counts[:e]) : sum(counts[: e + 1])].double() @ w[e].double().T
            for e in range(len(counts))
        ]
    )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and cuda-core")
# Types whose pairs are looked up, and others, two of them with a table in shared memory.
@pytest.mark.parametrize(
    "type,half",
    [
        *((type, torch.bfloat16) for type in prompt_grouped.LOOKED_UP),
        ("IQ4_K", torch.float16),
        ("Q4_K", torch.bfloat16),
        ("Q8_0", torch.float16),
        ("IQ3_XXS", torch.bfloat16),
        ("IQ1_S", torch.bfloat16),
    ],
)
# Those of the last three are few: small tiles are used but for the last one, which has many more of
# them.
@pytest.mark.parametrize(
    "counts",
    [
        *([5, 0, 130, 161, 33, 1], [400, 7, 0, 96], [40, 0, 64, 17, 33, 1, 0, 16]),
        *([40, 8, 65, 17, 33, 1, 2, 16], [40, 0, 65, 17, 130, 1, 0, 16]),
    ],
)
def test_against_float64(type, half, counts):
    rng = torch.Generator("cuda").manual_seed(3)
    width, hidden, tokens = 512, 256, 300
    n, n_experts = sum(counts), len(counts)
    x = torch.randn(tokens, width, generator=rng, device="cuda").to(half)
    sources = torch.randint(0, 3 * tokens, (n,), generator=rng, device="cuda", dtype=torch.int32)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    permuted = x[:, permutation(width, "cuda")].contiguous()
    gate, up, both = (
        packed(type, n_experts, rows, width, seed)
        for seed, rows in ((1, hidden), (2, hidden), (3, 2 * hidden))
    )
    down = packed(type, n_experts, 520, width, 4)
    rows = x[sources.long() // 3]

    out = torch.full((n + 2, 520), float("nan"), dtype=half, device="cuda")
    prompt_grouped.grouped_product(down, ends, permuted, out, sources, 3)
    assert error(out[:n], reference(down, rows, counts, half)) < 3e-3 and out[n:].isnan().all()
    for matrices in ([gate, up], [both]):
        out = torch.full((n + 2, hidden), float("nan"), dtype=half, device="cuda")
        prompt_grouped.grouped_gate_up(matrices, ends, permuted, out, sources, 3)
        products = torch.cat([reference(m, rows, counts, half) for m in matrices], dim=1)
        g, u = products.chunk(2, dim=1)
        expected = (g * g.sigmoid() * u)[:, permutation(hidden, "cuda")]
        assert error(out[:n], expected) < 3e-3 and out[n:].isnan().all()
        again = torch.empty_like(out)
        prompt_grouped.grouped_gate_up(matrices, ends, permuted, again, sources, 3)
        assert torch.equal(again[:n], out[:n])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and cuda-core")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("type", "width", "hidden", "spec"),
    [
        ("MXFP4", 2880, 2880, FFNSpec("swiglu_oai", limit=7.0)),
        ("MXFP4", 544, 352, FFNSpec("swiglu_oai", limit=1.0)),
        ("Q4_0", 512, 352, FFNSpec("capped_silu", limit=1.0)),
        ("NVFP4", 576, 192, FFNSpec()),
        ("IQ4_NL", 1440, 1408, FFNSpec("silu", limit=0.5)),
        ("Q8_0", 96, 160, FFNSpec("gelu")),
        ("IQ4_NL", 2688, 1856, FFNSpec("relu")),  # Nemotron 3 Nano
        ("F16", 544, 96, FFNSpec("gelu_erf")),
    ],
)
def test_terms_and_rows_that_are_no_multiple_of_128(type, width, hidden, spec, half):
    """Gate and up, then down on their result, with biases and scales of each expert."""
    rng = torch.Generator("cuda").manual_seed(3)
    counts, tokens = [70, 0, 161, 33], 120
    n, n_experts = sum(counts), len(counts)
    stored, inner = prompt_grouped.padded(width), prompt_grouped.padded(hidden)
    x = torch.randn(tokens, width, generator=rng, device="cuda").to(half)
    permuted = F.pad(x, (0, stored - width))[:, permutation(stored, "cuda")].contiguous()
    sources = torch.randint(0, 4 * tokens, (n,), generator=rng, device="cuda", dtype=torch.int32)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    expert = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)]).cuda()

    def terms(m):
        bias = torch.randn(n_experts, m.rows, generator=rng, device="cuda")
        return ExpertTerms(bias, torch.rand(n_experts, generator=rng, device="cuda") / width**0.5)

    def expected(m, terms, rows):
        y = reference(m, rows, counts, half)
        return y * terms.scale[expert, None] + terms.bias[expert]

    down = packed(type, n_experts, width // 8 * 8, hidden, 4)
    for shapes in ((1, hidden), (2, hidden)), ((3, 2 * hidden),):
        matrices = [packed(type, n_experts, rows, width, seed) for seed, rows in shapes]
        own, last = [terms(m) for m in matrices], terms(down)
        gating = Gating(spec.activation, spec.limit)
        gated_rows, again = (
            torch.full((n + 2, inner), float("nan"), dtype=half, device="cuda") for _ in range(2)
        )
        for out in (gated_rows, again):
            prompt_grouped.grouped_gate_up(matrices, ends, permuted, out, sources, 4, gating, own)
        assert torch.equal(again[:n], gated_rows[:n]) and gated_rows[n:].isnan().all()
        rows = x[sources.long() // 4]
        both = torch.cat([expected(*pair, rows) for pair in zip(matrices, own, strict=True)], 1)
        found = torch.empty_like(gated_rows[:n])
        found[:, permutation(inner, "cuda")] = gated_rows[:n]
        assert error(found[:, :hidden], gated(spec, *both.chunk(2, 1))) < 5e-3
        assert not found[:, hidden:].any()
        out = torch.full((n + 2, down.rows), float("nan"), dtype=half, device="cuda")
        prompt_grouped.grouped_product(down, ends, gated_rows, out, terms=last)
        assert error(out[:n], expected(down, last, found[:, :hidden])) < 5e-3
        assert out[n:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and cuda-core")
@pytest.mark.parametrize(("type", "half"), [("MXFP4", torch.bfloat16), ("NVFP4", torch.bfloat16)])
def test_four_bit_floats_are_decoded_exactly(type, half):
    """Products with unit vectors give the weights, for every scale and code."""
    rng = np.random.default_rng(5)
    t = ggml_type(type)
    blocks = rng.integers(0, 256, (256, 256 // t.block_size, t.block_bytes), dtype=np.uint8)
    if type == "MXFP4":  # 4 to 250: beyond are infinite values, below subnormal ones
        blocks[:, :, 0] = (4 + np.arange(256) % 247)[:, None]
    m = pack_matrix(type, [blocks.reshape(256, -1)], 256, 256, 1, "cuda")
    units = torch.eye(256, device="cuda", dtype=half)[:, permutation(256, "cuda")].contiguous()
    out = torch.empty(256, 256, device="cuda", dtype=half)
    ends = torch.tensor([256], device="cuda", dtype=torch.int32)
    prompt_grouped.grouped_product(m, ends, units, out)
    expected = decode_matrix(m, half)
    assert torch.isfinite(expected).all() and len(expected.unique()) > 250
    assert torch.equal(out.T, expected)


def test_permutation_is_one():
    assert torch.equal(permutation(256).sort().values, torch.arange(256))
    assert permutation(256)[[0, 1, 8, 9, 2, 16, 128]].tolist() == [
        0,
        1,
        2,
        3,
        32,
        4,
        128,
    ]


class Linear(SimpleNamespace):
    """What is read of a stack of matrices, which can be a key."""

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize("fits", [True, False])
def test_experts_that_are_decoded_first_are_named(monkeypatch, fits):
    told = []
    context = Context(torch.device("cpu"), verbose=told.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(prompt_grouped, "gate_up_fits", lambda *arguments: fits)
    monkeypatch.setattr(prompt_grouped, "fits", lambda *arguments: fits)
    for name in ("check_norm", "packed"):
        monkeypatch.setattr(prompt_moe, name, lambda *arguments, **options: None)
    linear = Linear(bias=None, scale=None)
    experts = Experts(linear, gate_up=linear)
    matrix = SimpleNamespace(packed=None)
    scores = SimpleNamespace(device=context.device, bias=None, matrix=matrix)
    router = Router(scores, RouterSpec(8, 2))
    branch = Branch(None, MoE(router, experts))
    prompt_moe.PromptMoE(PlacedBranch(3, branch, context.device), context)
    context.report_all()
    assert told == (
        []
        if fits
        else [
            "slow path: MoE of layer 3: no products that read packed experts of this shape on this"
            " device: all are decoded first"
        ]
    )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", packed_types())
def test_shared_memory_of_every_type(name, half):
    """A block has 227 KiB: for rows and results, and for tables, tiles and barriers."""
    type = ggml_type(name)
    for small in (False, True):
        plan = prompt_grouped.plan_of(type, half, small)
        assert plan.shared + shared_bytes(type) + 4096 <= 227 * 1024


def test_small_tiles_are_for_few_tokens():
    type = ggml_type("IQ4_K")
    assert prompt_grouped.may_be_small(type, 48 * 128, 128)
    assert not prompt_grouped.may_be_small(type, 48 * 128 + 1, 128)
    assert not prompt_grouped.may_be_small(ggml_type("BF16"), 128, 128)
    specs = [prompt_grouped.spec(type, torch.bfloat16, small=small) for small in (False, True)]
    assert [dict(s.defines)["TILE"] for s in specs] == ["160", "64"]
    assert specs[0].name != specs[1].name
