"""What the fast path is announced to take of a GPU's memory, for ranks that lack a part."""

from __future__ import annotations

import torch
from iqforge.imatrix.all_experts import moe_layers
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.planned import buffer_bytes, kept_bytes
from iqforge.runtime.layers.absent import AbsentRows
from iqforge.runtime.layers.dense_and_experts import DenseAndExperts
from iqforge.runtime.model import Model
from iqforge.runtime.state.cache import CacheSettings

CPU = torch.device("cpu")


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
