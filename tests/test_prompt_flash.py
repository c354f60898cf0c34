"""Flash attention of prompts on Hopper against sums in float64."""

from __future__ import annotations

import pytest
import torch
from iqforge.cuda_kernels.prompt import flash, flash_plan

from .flash_reference import BF16, CUDA, F16, LIMIT, expected, operands

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if not torch.cuda.is_available() or not flash_plan.fits(128, 128, CUDA):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(1)


def check(q, k, v, out_dtype=BF16, parts=None, plan=None, **options):
    scale = q.shape[3] ** -0.5
    found = [
        torch.full((*q.shape[:3], v.shape[3]), torch.nan, device=CUDA, dtype=out_dtype)
        for _ in range(2)
    ]
    for out in found:
        flash.flash_attention(q, k, v, out, scale=scale, parts=parts, plan=plan, **options)
    assert torch.equal(*(x.view(torch.int16) for x in found))
    truth = expected(q, k, v, scale, **options)
    error = (found[0].double() - truth).norm() / truth.norm()
    assert error < max(LIMIT[q.dtype], LIMIT[out_dtype])


@pytest.mark.parametrize(
    "lengths, plan",
    [(lengths, plan) for lengths, plans in flash_plan.PLANS.items() for plan in plans],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 3])
def test_every_plan(lengths, plan, parts):
    """Few rows after others, a tile that is not full, scores of 0 to 20."""
    check(*operands(lengths, 200, 777, 8, 2, sequences=2), parts=parts, plan=plan)
    check(*operands(lengths, 517, 517, 8, 4, size=8.0), parts=parts, plan=plan)


@pytest.mark.parametrize("half", [F16, BF16])
@pytest.mark.parametrize("out", [F16, BF16])
def test_dtypes(half, out):
    check(*operands((128, 128), 333, 700, 12, 1, half=half), out)


@pytest.mark.parametrize("window", [1, 100, 128, 4096])
@pytest.mark.parametrize("parts", [1, 4])
def test_windows(window, parts):
    """Parts of the positions may be empty."""
    check(*operands((128, 128), 300, 5000, 8, 2), window=window, parts=parts)


@pytest.mark.parametrize("parts", [1, 2])
def test_sinks_and_caps(parts):
    q, k, v = operands((64, 64), 500, 900, 16, 2, size=4.0)
    check(q, k, v, sinks=torch.randn(16, device=CUDA), parts=parts)
    check(q, k, v, sinks=torch.randn(16, device=CUDA), window=128, parts=parts)
    q, k, v = operands((256, 256), 300, 900, 8, 4, size=16.0)
    check(q, k, v, softcap=20.0, parts=parts)
    check(q, k, v, softcap=50.0, window=300, parts=parts)


@pytest.mark.parametrize("n", [1, 2, 31, 64, 129])
def test_few_queries_by_as_many_parts_as_they_get(n):
    for total in (n, 5000, 20000):
        check(*operands((128, 128), n, total, 32, 4))
        check(*operands((192, 128), n, total, 4, 4))


def test_some_heads_of_others():
    """Queries and results are some heads of more, and rows of keys and values longer."""
    q, k, v = operands((192, 128), 150, 400, 12, 12)
    wide = torch.randn(1, 400, 12 * 192 + 64, device=CUDA).to(F16)
    k = wide[..., : 12 * 192].unflatten(2, (12, 192))
    out = torch.full((1, 150, 12, 128), torch.nan, device=CUDA, dtype=BF16)
    part = slice(4, 9)
    flash.flash_attention(q[:, :, part], k[:, :, part], v[:, :, part], out[:, :, part], scale=0.1)
    truth = expected(q[:, :, part], k[:, :, part], v[:, :, part], 0.1)
    error = (out[:, :, part].double() - truth).norm() / truth.norm()
    assert error < LIMIT[BF16]
    assert out[:, :, :4].isnan().all() and out[:, :, 9:].isnan().all()


@pytest.mark.parametrize("parts", [1, 3])
def test_gates(parts):
    """Of each head after its queries, as qwen3.5 has them."""
    q, k, v = operands((256, 256), 100, 300, 8, 2)
    joined = torch.randn(1, 100, 8, 512, device=CUDA).to(BF16)
    out = torch.full((1, 100, 8, 256), torch.nan, device=CUDA, dtype=BF16)
    flash.flash_attention(q, k, v, out, scale=0.05, gates=joined[..., 256:], parts=parts)
    truth = expected(q, k, v, 0.05) * joined[..., 256:].double().sigmoid()
    assert (out.double() - truth).norm() < LIMIT[BF16] * truth.norm()
    of_heads = joined[..., :1]
    flash.flash_attention(q, k, v, out, scale=0.05, gates=of_heads, parts=parts)
    truth = expected(q, k, v, 0.05) * of_heads.double().sigmoid()
    assert (out.double() - truth).norm() < LIMIT[BF16] * truth.norm()
    more = {"gates": joined[..., 256:], "softplus": True, "parts": parts}  # as Laguna has it
    flash.flash_attention(q, k, v, out, scale=0.05, **more)
    truth = expected(q, k, v, 0.05) * torch.nn.functional.softplus(joined[..., 256:].double())
    assert (out.double() - truth).norm() < LIMIT[BF16] * truth.norm()
