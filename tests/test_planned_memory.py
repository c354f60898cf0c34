"""What the fast path is announced to take of a GPU's memory, for ranks that lack a part and for
layers with windows.
"""

from __future__ import annotations

import pytest
import torch
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.planned import buffer_bytes, kept_bytes
from iqforge.runtime.layers.absent import AbsentRows
from iqforge.runtime.layers.dense_and_experts import DenseAndExperts
from iqforge.runtime.model import Model
from iqforge.runtime.network.experts import moe_layers
from iqforge.runtime.split_report import split_report
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

CPU = torch.device("cpu")
CONTEXT = 4096


def test_a_rank_without_experts_or_without_the_dense_layer_takes_less():
    with Model(SyntheticSource("gemma4:Q8_0"), CPU) as model:
        blocks = model.network.blocks[:1]

        def announced() -> int:
            n_bytes = buffer_bytes(blocks, model.network.width, 512, 512, CacheSettings(), CPU)
            return n_bytes + kept_bytes(blocks, CacheSettings())

        [both] = [
            branch.module
            for branch in blocks[0].branches
            if isinstance(branch.module, DenseAndExperts)
        ]
        whole = announced()
        dense, both.dense = both.dense, AbsentRows()
        without_dense = announced()
        both.dense, both.moe = dense, None
        assert 0 < announced() < without_dense <= whole
        assert len(list(moe_layers(model.network))) == len(model.network.blocks) - 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_layers_with_a_window_take_what_is_announced(fast, full, monkeypatch):
    """Kernels read caches whose positions follow each other, so they keep all of them."""
    monkeypatch.setattr(Model, "is_fast", fast)
    source, switches = SyntheticSource("gpt-oss-20b:MXFP4,layers=2"), Switches(swa_full=full)
    with Model(source, CPU, context=CONTEXT, switches=switches) as model:
        [announced] = model.memory()
        state = model.new_state(CONTEXT)
        assert announced.cache == sum(layer.nbytes for layer in state.layers)
        keys_and_values = 2 * CONTEXT * 8 * 64 * 2  # of a layer with all positions, f16
        whole, windowed = 2 * keys_and_values, keys_and_values * (1 + 704 / CONTEXT)
        assert announced.cache == (whole if fast or full else windowed)
        planned = split_report(source, (1, 1), context=CONTEXT, switches=switches)
        assert sum(planned.cache) == whole
