"""Products of few tokens with packed weights: they agree with float64 on a Hopper GPU, and the
prompt path brings the right matrices together.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.prompt import few, flash_plan
from iqforge.cuda_kernels.prompt.grouped import FLOATS
from iqforge.errors import ShapeError
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import supported
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.common import few as prompt_few

from .few_products import error, expected, packed

HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and importlib.util.find_spec("cuda") is not None
)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and cuda-core")
TYPES = [name for name in packed_types() if supported(ggml_type(name)) and name not in FLOATS]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("type", TYPES)
def test_against_float64(type):
    """Three matrices that fill no tile, with a bias; parts of tiles on several blocks."""
    space = few.workspace(torch.device("cuda", torch.cuda.current_device()))
    matrices = [packed(type, rows, 1024, rows) for rows in (272, 64, 144)]
    for half in (torch.bfloat16, torch.float16):
        bias = torch.randn(480, device="cuda").to(half)
        for n in (1, 40, 64, 65, 128) if half == torch.bfloat16 else (17,):
            x = torch.randn(n, 1024, device="cuda").to(half)
            outs = [torch.full((n + 1, 496), torch.nan, dtype=half, device="cuda") for _ in "12"]
            for out in outs:
                few.few_product(matrices, x, out[:n, 8:488], space, bias)
            assert error(outs[0][:n, 8:488], expected(matrices, x, bias)) < 4e-3
            assert torch.equal(outs[0][:n, 8:488], outs[1][:n, 8:488])
            outs[0][:n, 8:488] = torch.nan
            assert outs[0].isnan().all()  # nothing is written elsewhere
    assert not space.arrived.any()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("cols", [32, 96, 2080])
@pytest.mark.parametrize("n", [9, 200, 600])
def test_other_shapes(cols, n):
    """Rows that are no multiple of 128, several tiles of tokens, whole tiles, a part of a matrix,
    and a scale.
    """
    space = few.workspace(torch.device("cuda", torch.cuda.current_device()))
    m = dataclasses.replace(packed("Q8_0", 8000, cols, 1), scale=0.5)
    x = torch.randn(n, cols, device="cuda").bfloat16()
    out = torch.full((n, 8000), torch.nan, dtype=torch.bfloat16, device="cuda")
    few.few_product([m], x, out, space)
    truth = expected([m], x)
    assert error(out, truth) < 4e-3
    part = torch.empty(n, 104, dtype=torch.bfloat16, device="cuda")
    few.few_product([m], x, part, space, part=slice(7000, 7104))
    assert error(part, truth[:, 7000:7104]) < 4e-3
    assert not space.arrived.any()


@pytest.mark.parametrize("part", [None, slice(16, 48)])
def test_neighbours_of_one_type_are_one_launch(monkeypatch, part):
    """Others are decoded first; every result and bias is where it belongs."""
    types = ["Q8_0"] if part else ["Q8_0", "Q8_0", "F32", "Q4_0", "Q4_0", "Q4_0", "Q4_0"]
    matrices = [packed(type, 64, 64, seed, "cpu") for seed, type in enumerate(types)]
    rows = 32 if part else 64 * len(types)
    launches = []

    def product(some, x, out, space, bias, part):
        launches.append([m.type.name for m in some])
        out.copy_(expected(some, x)[:, part or slice(None)] + bias.double())

    monkeypatch.setattr(few, "is_used", lambda device: True)
    monkeypatch.setattr(few, "workspace", lambda device: few.Workspace(*torch.empty(3, 1)))
    monkeypatch.setattr(few, "few_product", product)
    context = Context(torch.device("cpu"), torch.bfloat16)
    bias, x = torch.randn(rows).bfloat16(), torch.randn(9, 64).bfloat16()
    products = prompt_few.FewTokens(matrices, bias, part, context)
    assert products.takes(x) and not products.takes(torch.empty(few.MOST_TOKENS + 1, 64))
    assert not products.takes(torch.empty(9, 68)[:, 4:].bfloat16()[:, ::2])
    out = torch.empty(9, rows).bfloat16()
    products(x, out)
    assert launches == ([["Q8_0"]] if part else [["Q8_0"] * 2, ["Q4_0"] * 3, ["Q4_0"]])
    truth = expected(matrices, x)[:, part or slice(None)] + bias.double()
    assert error(out, truth) < 5e-3
    floats = prompt_few.FewTokens([packed("F32", 64, 64, 1, "cpu")], None, None, context)
    assert not floats.takes(x)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: 1)
    m, x = packed("Q8_0", 8, 32, 1, "cpu"), torch.empty(1, 32).bfloat16()
    space = few.workspace(torch.device("cpu"))
    with pytest.raises(ShapeError, match="1 rows of 32 activations times 8 rows of weights"):
        few.few_product([m], x, torch.empty(1, 8), space._replace(x=torch.empty(96)))
    assert few.takes(x) and not few.takes(torch.empty(1, 40).bfloat16()[:, 4:])


@pytest.mark.parametrize("tiles", [1, 5, 24, 112, 132, 224, 1000])
@pytest.mark.parametrize("steps", [1, 3, 32, 112])
def test_every_multiprocessor_has_steps(tiles, steps):
    blocks = few.blocks_for(tiles, steps, 132)
    assert 0 < blocks <= min(132, tiles * steps)
    # No block has many more steps than if all were divided among all multiprocessors.
    assert -(-tiles * steps // blocks) <= -(-tiles * steps // 132) + 4 + steps % 2
