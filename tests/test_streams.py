"""Several residual streams, and indexers that choose pools of positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.layers.block import Block, Branch
from iqforge.runtime.layers.indexer import PooledIndexer
from iqforge.runtime.layers.specs import IndexerSpec
from iqforge.runtime.layers.streams import HyperConnection, StreamEnds, StreamSpec, StreamWeights
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.split_model import make_stage
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.placement import CPU

from .random_models import Models
from .thread_ranks import ThreadMeeting, on_ranks

N, WIDTH, ROWS = 4, 12, 5


def connection(fn: Any, base: torch.Tensor, scale: torch.Tensor, **spec: Any) -> HyperConnection:
    weights = StreamWeights(
        StreamSpec(N, norm_eps=1e-5, **spec), fn=fn, scale=scale, base=base, name="hc_attn"
    )
    return HyperConnection(weights)


def test_streams_keep_their_sum():
    """The matrix that mixes them has columns and rows of sum 1: what the streams have together is
    kept, and the shares of the branch's result are added.
    """
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(N * (2 + N), N * WIDTH, generator=random)
    base = 0.3 * torch.randn(N * (2 + N), generator=random)
    scale = torch.tensor([0.3, 0.7, 0.1])
    c = connection(lambda x: x @ weight.T, base, scale, epsilon=1e-6, iterations=20)
    h = torch.randn(ROWS, N * WIDTH, generator=random)
    read, shares, mixing = c.before(h)
    assert read.shape == (ROWS, WIDTH) and (mixing > 0).all()
    for axis in (1, 2):
        torch.testing.assert_close(mixing.sum(axis), torch.ones(ROWS, N), rtol=0, atol=1e-3)
    y = torch.randn(ROWS, WIDTH, generator=random)
    after = c.after(h, y, shares, mixing).unflatten(1, (N, -1)).sum(1)
    before = h.unflatten(1, (N, -1)).sum(1)
    expected = before + shares.sum(1, keepdim=True) * y
    torch.testing.assert_close(after, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("mean", [True, False])
def test_equal_streams_stay_equal_where_shares_are(mean):
    """With numbers of one value each, a branch adds to every stream what it makes of one, and the
    streams end in this one.
    """
    quarter = torch.full((N,), -1.0986123)  # whose sigmoid is 1 / 4
    base = torch.cat([quarter, torch.zeros(N), torch.zeros(N * N)])
    nothing: Any = lambda x: torch.zeros(len(x), N * (2 + N))  # noqa: E731
    c = connection(nothing, base, torch.ones(3), epsilon=0.0, iterations=3)
    last = StreamWeights(
        c.weights.spec,
        fn=lambda x: torch.zeros(len(x), N),  # pyright: ignore[reportArgumentType]  a product
        scale=torch.ones(1),
        base=quarter,
        name="output_hc",
    )
    ends = StreamEnds(N, None if mean else last)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    double: Any = lambda x: 2 * x  # noqa: E731
    block = Block([Branch(None, double, streams=c)], torch.device("cpu"))
    batch: Any = SimpleNamespace(layer=0)
    after = block(ends.begin(x), batch)
    torch.testing.assert_close(after, (3 * x).repeat(1, N))  # x + 2 (4 x / 4)
    torch.testing.assert_close(ends.end(after), 3 * x)
    names = [f"output_hc_{part}.weight" for part in ("fn", "scale", "base")]
    assert [*ends.tensors] == ([] if mean else names)


def pooled(pool: int, top_k: int, heads: int = 3, length: int = 8) -> PooledIndexer:
    parts: Any = dict.fromkeys(("q", "k", "k_norm", "weights", "rope", "gate"))
    random = torch.Generator().manual_seed(3)
    offsets = torch.randn(pool, length, generator=random)
    return PooledIndexer(IndexerSpec(heads, length, 0, top_k), offsets=offsets, **parts)


@pytest.mark.parametrize("total, n", [(23, 23), (23, 5), (24, 1), (25, 3), (3, 3)])
def test_the_best_pools_and_the_tail_are_seen(total, n):
    """Against the definition, position by position."""
    pool, top_k = 4, 8
    indexer = pooled(pool, top_k)
    random = torch.Generator().manual_seed(total)
    q, k, weights = (
        torch.randn(*size, generator=random) for size in ((n, 3, 8), (total, 16), (n, 3))
    )
    found = indexer.select(q, k, weights)
    assert found.shape == (n, total)
    for row, position in enumerate(range(total - n, total)):
        scores = []
        for start in range(0, position + 2 - pool, pool):
            keys, gates = k[start : start + pool].chunk(2, dim=1)
            key = ((gates + indexer.offsets).softmax(0) * keys).sum(0)
            scores.append(float((weights[row] * (q[row] @ key).relu()).sum()))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: top_k // pool]
        seen = {x for i in best for x in range(i * pool, (i + 1) * pool)}
        seen |= set(range(len(scores) * pool, position + 1))
        assert set(found[row].nonzero().flatten().tolist()) == seen, position


@pytest.mark.parametrize(
    "case, shares", [("glm5_next", (1, 1)), ("glm5_next", (1, 2, 1)), ("qwen4exp", (1, 1, 1))]
)
def test_ranks_with_layers(tmp_path, case, shares):
    """They hand all streams on, and the last one ends them."""
    models = Models(tmp_path)
    path, settings = models.file(case, "small"), CacheSettings("f32", "f32")
    tokens = [int(token) for token in models.tiny(case, "small").tokens]

    def evaluated(model: Model) -> list[torch.Tensor]:
        state = model.new_state(64, settings)
        pieces = [model.extend(tokens[i : i + 9], state) for i in range(0, 27, 9)]
        return [model.forward(tokens), *pieces]

    def work(rank: int, meeting: ThreadMeeting) -> list[torch.Tensor]:
        source = open_gguf(path)
        with Model(source, stage=make_stage(source, shares, meeting, CPU), ubatch=5) as model:
            return evaluated(model)

    with load_model(path, ubatch=5) as model:
        wanted = evaluated(model)
    for found in on_ranks(len(shares), work):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
