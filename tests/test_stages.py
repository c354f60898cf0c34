"""`-sm layer`: whole layers on each rank, here threads of one process."""

from __future__ import annotations

from collections.abc import Sequence

import iqforge
import numpy as np
import pytest
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.parallel.stages import layer_ends
from iqforge.runtime.split_model import kept_together, make_stage, network_of
from iqforge.runtime.weights.placement import CPU, Placement

from .golden import GOLDEN
from .shared import shared
from .thread_ranks import ThreadMeeting, on_ranks


@pytest.mark.parametrize(
    "n_layers, shares, first, ends",
    [
        (8, (1, 1), 0, (4, 8)),
        (8, (1, 1, 2), 0, (2, 4, 8)),
        (32, (3, 1), 0, (24, 32)),
        (10, (1, 1), 4, (7, 10)),  # four layers are on the CPU, with the first rank
        (3, (100, 1, 1), 0, (1, 2, 3)),  # everybody has a layer
        (2, (1, 1, 1), 0, (0, 1, 2)),  # there are not enough
        (4, (0, 1, 1), 0, (0, 2, 4)),
    ],
)
def test_layers_of_ranks(n_layers, shares, first, ends):
    assert layer_ends(n_layers, shares, first) == ends


def test_layers_that_share_something_stay_on_one_rank():
    assert layer_ends(10, (1, 1), 0, [range(4, 10)]) == (4, 10)
    assert layer_ends(10, (1, 1), 0, [range(2, 6)]) == (6, 10)
    assert layer_ends(10, (1, 1, 1), 0, [range(10)]) == (10, 10, 10)
    assert layer_ends(9, (1, 1, 1), 0, [range(2, 5)]) == (2, 6, 9)


def test_later_layers_that_use_keys_of_earlier_ones():
    with open_gguf(path_of("gemma4_e")) as source:
        found = kept_together(network_of(source))
        assert found and all(len(one) > 1 for one in found)


def test_other_layers_take_no_memory():
    place = Placement(torch.device("cuda:1"), 4, here=range(1, 3))
    devices = {name: str(place.of(name)) for name in map("blk.{}.ffn_up.weight".format, range(4))}
    assert list(devices.values()) == ["cpu", "cuda:1", "cuda:1", "cpu"]
    assert str(place.of("output.weight")) == "cuda:1" and not place.is_here("blk.3.ffn_up.weight")


def path_of(name: str) -> str:
    return str(shared(f"golden/convert/{name}/expected-f32.gguf"))


def staged(source, shares: Sequence[float], meeting: ThreadMeeting, **options) -> Model:
    return Model(source, stage=make_stage(source, shares, meeting, CPU), **options)


def check_same(name: str, shares: Sequence[float]) -> None:
    tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"][:24]

    def evaluated(model: Model, tokens: np.ndarray) -> list:
        state = model.new_state(64)
        pieces = [model.extend(tokens[i : i + 12], state) for i in range(0, len(tokens), 12)]
        drawn = list(model.follow(5, state, 3, Sampling(seed=7)))
        return [model.forward(tokens), *pieces, torch.tensor(drawn)]

    def work(rank: int, meeting: ThreadMeeting) -> list:
        with staged(open_gguf(path_of(name)), shares, meeting, ubatch=5) as model:
            held, layers = model.memory()[0].weights, model.network.layers
            all_layers = len(layers) == len(model.network.blocks)
            return [*evaluated(model, tokens), held if all_layers else held + 1]

    with iqforge.load_model(path_of(name), ubatch=5) as model:
        wanted = evaluated(model, tokens)
        whole = model.memory()[0].weights
    ranks = on_ranks(len(shares), work)
    for found in ranks:
        assert found.pop() <= whole, "a rank without all layers takes less memory"
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma4_e", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_ranks_with_layers_give_the_logits_of_one(name):
    check_same(name, (1, 1))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("shares", [(1, 1), (1, 2, 1)])
@pytest.mark.parametrize("name", GOLDEN)
def test_every_model_by_layers(name, shares):
    check_same(name, shares)


def test_many_layers_on_three_ranks():
    tokens = np.arange(7)

    def work(rank: int, meeting: ThreadMeeting) -> tuple[range, torch.Tensor]:
        with staged(SyntheticSource("llama-tiny:Q8_0"), (1, 1, 1), meeting) as model:
            return model.network.layers, model.forward(tokens)

    with Model(SyntheticSource("llama-tiny:Q8_0")) as model:
        wanted, n_layers = model.forward(tokens), len(model.network.blocks)
    found = on_ranks(3, work)
    assert [layer for layers, _ in found for layer in layers] == list(range(n_layers))
    for _, logits in found:
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
