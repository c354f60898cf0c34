"""Rows of a prompt that attend to all positions in the absorbed form, without a GPU: kernels that
g++ compiles are compared with the naive form in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.attention import mla as attention_mla
from iqforge.cuda_kernels.attention.mla_shape import LatentShape
from iqforge.runtime.cuda.prompt.mixers import latent_absorbed
from iqforge.runtime.layers.specs import MLASpec

from .kernels_on_host import LIMIT, library, pointer
from .latent_reference import ABSORBED_ERRORS, absorbed_error

RUN = """
extern "C" void latent_attention_(int splits, int tiles, const u16* queries, const u8* rows,
                                  const int* position, float* partial) {
    launch_on_host(splits, tiles, TEAMS * THREADS,
                   [&] { latent_attention(queries, rows, position, partial, nullptr, ROWS); });
}
extern "C" void latent_values_(int heads, int blocks, const float* partial, const int* position,
                               int splits, const uint4* values, float* out) {
    launch_on_host(heads, blocks, THREADS,
                   [&] { latent_values(partial, position, splits, values, out); });
}
"""
SPEC = MLASpec(3, 0, 64, 24, 64, 40, 0.1)


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """Replace launches by calls of the kernels on the CPU, with the same arguments."""
    loaded = {}

    def function(spec, name, device):
        if spec.name not in loaded:
            (tmp_path / spec.name).mkdir()
            loaded[spec.name] = library(tmp_path / spec.name, spec, RUN)
        return getattr(loaded[spec.name], f"{name}_")

    def launch(kernel, grid, block, *arguments, shared=0, pdl=False, cluster=None):
        if kernel.__name__ == "latent_attention_":
            arguments = arguments[:-2]  # no list of positions, and as many rows as the shape has
        kernel(*grid, *(int(x) if isinstance(x, np.int32) else pointer(x) for x in arguments))

    monkeypatch.setattr(attention_mla, "function", function)
    monkeypatch.setattr(attention_mla, "launch", launch)
    for module in (attention_mla, latent_absorbed):
        monkeypatch.setattr(module, "shared_limit", lambda device: LIMIT)
    monkeypatch.setattr(attention_mla, "splits_of", lambda *_: 3)
    monkeypatch.setattr(LatentShape, "on", lambda self, device: self)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


@pytest.mark.parametrize(
    "dtype, n, most", [(torch.float16, 5, 2), (torch.bfloat16, 3, 8), (torch.float16, 1, 8)]
)
def test_rows_see_all_positions_up_to_their_own(on_host, monkeypatch, dtype, n, most):
    """Also where the last rows overlap with others, and with a single query."""
    monkeypatch.setattr(latent_absorbed, "MOST_ROWS", most)
    error = absorbed_error(SPEC, dtype, 150, n, torch.device("cpu"))
    assert error < ABSORBED_ERRORS[dtype]
