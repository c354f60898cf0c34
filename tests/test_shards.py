"""Shards of tensors: what a rank reads is the slice of the whole tensor, in every type."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from iqforge.errors import ShapeError
from iqforge.formats.codecs import codec
from iqforge.formats.source import Source, TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows, supported
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.split_model import make_plan
from iqforge.runtime.weights.shard import ShardSource, local_tensor
from iqforge.runtime.weights.split_plan import SplitPlan, TensorSplit

TYPES = [name for name in codec.decodable_types() if supported(name)]
EXPERTS, ROWS, COLUMNS = 3, 48, 1024


class OneTensor(Source):
    """A source of one tensor, which remembers the rows that are read."""

    def __init__(self, tensor: TensorInfo, rows: np.ndarray):
        self.path, self.files, self.metadata = "one tensor", (), {}
        self.tensors, self.rows, self.read = (tensor,), rows, []

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        self.read.append((start, stop))
        return self.rows[start:stop]


def stack(type: str) -> OneTensor:
    tensor = TensorInfo("w", (EXPERTS, ROWS, COLUMNS), ggml_type(type))
    rng = np.random.default_rng(len(type))
    return OneTensor(tensor, random_rows(tensor.type, tensor.n_rows, COLUMNS, 1.0, rng))


def decoded(tensor: TensorInfo, rows: np.ndarray) -> np.ndarray:
    return codec.decode(tensor.type, rows, tensor.n_cols).reshape(tensor.shape)


def shard(source: Source, split: TensorSplit, rank: int) -> tuple[TensorInfo, np.ndarray]:
    """Return the local tensor and its values."""
    n = max(1, len(split.ranges))
    local = ShardSource(source, SplitPlan((1 / n,) * n, {"w": split}, ()), rank)
    [tensor] = local.tensors
    return tensor, decoded(tensor, local.read_rows(tensor, 0, tensor.n_rows))


def sliced(whole: np.ndarray, split: TensorSplit, rank: int) -> np.ndarray:
    pieces = [np.arange(*r) for r in split.ranges[rank]]
    return whole.take(np.concatenate(pieces), axis=split.axis)


SPLITS = {
    "columns": TensorSplit("columns", (((0, 256),), ((256, 1024),)), -1),
    "ranges of columns": TensorSplit(
        "columns", (((0, 256), (512, 768)), ((256, 512), (768, 1024))), -1
    ),
    "rows": TensorSplit("rows", (((0, 16),), ((16, 48),)), -2),
    "halves of rows": TensorSplit("rows", (((0, 16), (32, 48)), ((16, 32),)), -2),
    "rows twice": TensorSplit("rows", (((0, 16), (0, 16)), ((0, 16),)), -2),
    "experts": TensorSplit("experts", (((0, 2),), ((2, 3),)), 0),
}


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("type", TYPES)
def test_a_shard_is_a_slice_of_the_whole(type, kind):
    source, split = stack(type), SPLITS[kind]
    whole = decoded(source.tensors[0], source.rows)
    for rank in range(2):
        tensor, values = shard(source, split, rank)
        np.testing.assert_array_equal(values, sliced(whole, split, rank))
        assert tensor.n_bytes == tensor.type.tensor_bytes(values.shape)


@pytest.mark.parametrize("type", ["IQ4_K", "IQ4_KS", "IQ4_KS_R4", "Q8_K_R8"])
def test_a_shard_can_be_read_in_pieces(type):
    source = stack(type)
    for split in SPLITS.values():
        local = ShardSource(source, SplitPlan((0.5, 0.5), {"w": split}, ()), 0)
        [tensor] = local.tensors
        at_once = local.read_rows(tensor, 0, tensor.n_rows)
        for step in (16, 32, 56):
            pieces = [
                local.read_rows(tensor, start, min(start + step, tensor.n_rows))
                for start in range(0, tensor.n_rows, step)
            ]
            np.testing.assert_array_equal(np.concatenate(pieces), at_once)
        n = at_once.size
        np.testing.assert_array_equal(
            local.read_bytes(tensor, 5, n - 7), at_once.reshape(-1)[5 : n - 7]
        )


def test_only_own_rows_are_read():
    source = stack("IQ4_K")
    shard(source, SPLITS["rows"], 1)
    assert source.read == [(16, 48), (64, 96), (112, 144)]
    source.read.clear()
    shard(source, SPLITS["experts"], 1)
    assert source.read == [(96, 144)]


@pytest.mark.parametrize(
    "type, split",
    [
        ("IQ4_K", TensorSplit("columns", (((0, 128),), ((128, 1024),)), -1)),
        ("IQ4_K_R4", TensorSplit("rows", (((0, 6),), ((6, 48),)), -2)),
        ("Q8_0", TensorSplit("columns", (((0, 1056),), ()), -1)),
    ],
)
def test_cuts_within_blocks_are_refused(type, split):
    with pytest.raises(ShapeError, match="cannot be cut at"):
        local_tensor(stack(type).tensors[0], split, 0)


@pytest.mark.parametrize("experts", ["columns", "whole"])
@pytest.mark.parametrize("shares", [(1, 1), (2, 1, 1)])
def test_random_weights_of_a_shard_repeat_as_it_says(shares, experts):
    source = SyntheticSource("qwen3-30b-a3b:IQ4_KS")
    plan = make_plan(source, shares, experts=experts)
    names = ("attn_q", "attn_output", "ffn_gate_exps", "ffn_down_exps", "output_norm")
    for rank in range(len(shares)):
        local = ShardSource(source, plan, rank)
        for tensor in local.tensors:
            if tensor.name.startswith(("blk.0.", "output")) and any(
                n in tensor.name for n in names
            ):
                period = local.period(tensor)
                assert 0 < period <= tensor.n_rows
                n = min(64, tensor.n_rows - period)
                np.testing.assert_array_equal(
                    local.read_rows(tensor, period, period + n), local.read_rows(tensor, 0, n)
                )


def test_an_output_that_is_the_embedding_is_split():
    source = stack("Q8_0")
    table = TensorInfo("token_embd.weight", (EXPERTS * ROWS, COLUMNS), ggml_type("Q8_0"))
    source.tensors = (table,)
    split = TensorSplit("rows", (((0, 80),), ((80, 144),)), -2, tied=table.name)
    plan = SplitPlan((0.5, 0.5), {"output.weight": split}, ())
    local = ShardSource(source, plan, 1)
    assert local.tensors == (table, replace(table, name="output.weight", shape=(64, COLUMNS)))
    np.testing.assert_array_equal(local.read_rows(local.tensors[1], 0, 64), source.rows[80:144])
    np.testing.assert_array_equal(local.read_rows(local.tensors[0], 0, 144), source.rows)
