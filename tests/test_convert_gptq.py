"""GPTQ checkpoints: decoded values equal what the layout rules say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError

from .packed_checkpoint import NAME, pack, packed_llama, up_projection


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version, order", [("gptq", False), ("gptq", True), ("gptq_v2", False)])
def test_gptq(tmp_path: Path, bits: int, version: str, order: bool):
    random = torch.Generator().manual_seed(bits)
    codes, zeros = (
        torch.randint(0, 1 << bits, (48, 80), generator=random),
        torch.randint(0, 1 << bits, (3, 80), generator=random),
    )
    scale = (torch.rand((3, 80), generator=random) + 0.5).half()
    groups = torch.randperm(48, generator=random) % 3 if order else torch.arange(48) // 16

    def change(tensors):
        del tensors[f"{NAME}.weight"]
        tensors |= {
            f"{NAME}.qweight": pack(codes, bits, 0),
            f"{NAME}.qzeros": pack(zeros, bits, 1),
            f"{NAME}.scales": scale,
        }
        if order:
            tensors[f"{NAME}.g_idx"] = groups.int()

    found = up_projection(
        packed_llama(
            tmp_path, change, {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
        )
    )
    wanted = (codes - (zeros[groups] + (version == "gptq"))).float() * scale.float()[groups]
    assert np.array_equal(found, wanted.T.numpy())


@pytest.mark.parametrize(
    "part, values, section, words",
    [
        ("qzeros", None, {}, "without qzeros"),
        ("scales", torch.ones(3, 79), {}, r"expected \[groups, 80\]"),
        ("scales", torch.ones(5, 80), {}, "groups"),
        ("qzeros", torch.zeros(3, 10), {}, r"expected I32 of shape \[3, 10\]"),
        ("g_idx", torch.full((48,), 3), {}, "one of 3"),
        ("g_idx", torch.zeros(47, dtype=torch.int32), {}, r"expected \[48\]"),
        ("qweight", torch.zeros(6, 80), {}, "a matrix of I32"),
        ("scales", torch.ones(3, 80), {"bits": 3}, "'bits' is 3"),
    ],
)
def test_gptq_that_does_not_fit(
    tmp_path: Path, part: str, values: torch.Tensor | None, section: dict, words: str
):
    def change(tensors):
        del tensors[f"{NAME}.weight"]
        stored = {
            "qweight": torch.zeros(6, 80, dtype=torch.int32),
            "qzeros": torch.zeros(3, 10, dtype=torch.int32),
            "scales": torch.ones(3, 80),
            part: values,
        }
        tensors |= {
            f"{NAME}.{name}": stored for name, stored in stored.items() if stored is not None
        }

    with pytest.raises(CheckpointError, match=words):
        up_projection(packed_llama(tmp_path, change, {"quant_method": "gptq", "bits": 4} | section))


def test_threads_may_release_tensors_that_others_read(tmp_path: Path):
    def change(tensors):
        del tensors[f"{NAME}.weight"]
        tensors |= {
            f"{NAME}.qweight": torch.full((6, 80), 0x11111111, dtype=torch.int32),
            f"{NAME}.scales": torch.ones(3, 80),
            f"{NAME}.qzeros": torch.zeros(3, 10, dtype=torch.int32),
        }

    folder = packed_llama(tmp_path, change, {"quant_method": "gptq", "bits": 4})
    with CheckpointSource(open_checkpoint(folder)) as source, ThreadPoolExecutor(4) as pool:
        tensor = next(t for t in source.tensors if t.name == "blk.1.ffn_up.weight")
        reads = []
        for row in [*range(80)] * 3:
            reads.append(pool.submit(source.read_rows, tensor, row, row + 1))
            source.release(tensor)
        assert all(not read.result().any() for read in reads)  # 1 - (0 + 1) = 0
