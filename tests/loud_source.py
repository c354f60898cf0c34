"""A model whose activations exceed the range of float16."""

from __future__ import annotations

import numpy as np
from iqforge.runtime.bench.synthetic import SyntheticSource


class LoudSource(SyntheticSource):
    """Random weights in BF16, of which `blk.1.ffn_up.weight` is very large."""

    def read_rows(self, tensor, start, stop):
        rows = super().read_rows(tensor, start, stop)
        if tensor.name != "blk.1.ffn_up.weight":
            return rows
        values = (rows.view("<u2").astype(np.uint32) << 16).view(np.float32) * np.float32(1e7)
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
