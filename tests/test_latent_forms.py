"""Which form latent attention takes in a prompt, by shapes alone, and what it announces."""

import pytest
import torch
from iqforge.cuda_kernels.attention.mla_shape import MOST_ROWS, LatentShape, fits
from iqforge.runtime.cuda.prompt.mixers import latent_absorbed
from iqforge.runtime.cuda.prompt.mixers.latent_absorbed import (
    FEWEST_KEYS,
    KEYS_OF_QUERY,
    MOST_QUERIES,
    buffers_of_rows,
    is_absorbed,
)
from iqforge.runtime.layers.specs import MLASpec

LIMIT = 224 * 1024  # bytes of shared memory of a block, as H100 and H200 have them


@pytest.mark.parametrize("heads", [16, 128])
def test_few_queries_after_many_positions_are_absorbed(heads):
    fewest = FEWEST_KEYS // heads
    assert is_absorbed(1, fewest, heads)
    assert not is_absorbed(1, fewest - 1, heads)
    most = min(MOST_QUERIES, FEWEST_KEYS // KEYS_OF_QUERY)
    assert is_absorbed(most, fewest, heads)
    assert not is_absorbed(most + 1, fewest, heads)
    many = MOST_QUERIES * max(FEWEST_KEYS, KEYS_OF_QUERY)
    assert is_absorbed(MOST_QUERIES, many, heads)
    assert not is_absorbed(MOST_QUERIES + 1, many, heads)


def test_new_prompts_are_naive():
    for n in (9, 128, 512, 2048, 8192):
        assert not is_absorbed(n, n, 128)


@pytest.mark.parametrize("form", [True, False])
def test_a_form_can_be_forced(monkeypatch, form):
    monkeypatch.setattr(latent_absorbed, "forced", form)
    assert is_absorbed(1, 1 << 20, 16) is form is is_absorbed(4096, 4096, 1)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("type", ["F16", "BF16"])
def test_real_sizes_have_kernels(heads, type):
    for rows in (1, MOST_ROWS):
        shape = LatentShape(rows, heads, 128, 64, 512, 128, type, torch.float16)
        assert fits(shape, LIMIT)


def test_buffers_hold_the_parts_of_all_blocks():
    """As many blocks as a large GPU has multiprocessors, or one for each tile."""
    for heads in (16, 128, 1024):
        s = MLASpec(heads, 0, 512, 128, 64, 128, 192**-0.5)
        shape = LatentShape(MOST_ROWS, heads, 128, 64, 512, 128, "F16", torch.float16)
        blocks = shape.tiles * max(1, 160 // shape.tiles)
        found = buffers_of_rows(s)
        assert found["partial"] >= 4 * blocks * shape.part_floats
        assert found["absorbed results"] == MOST_QUERIES * heads * 128 * 4
