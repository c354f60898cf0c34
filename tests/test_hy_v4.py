"""Hy4: both forms of latent attention with sinks and gates, streams that keep what they are, and
files that contradict themselves. That logits are those of the reference is in
`test_architectures_random.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from iqforge.errors import ConfigError, IqforgeError, MalformedFileError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, f32, u32
from iqforge.runtime.cpu.latent import plan_latent
from iqforge.runtime.cpu.plan import NotPlanned
from iqforge.runtime.cuda.common.registry import Slow, check_description
from iqforge.runtime.layers.block import Branch
from iqforge.runtime.layers.mla import MLA
from iqforge.runtime.layers.streams import KeepingConnection, StreamSpec, StreamWeights
from iqforge.runtime.model import load_model

from .random_models import Models
from .tiny_model import write_gguf

CASE = "hy_v4"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return Models(tmp_path_factory.mktemp("hy_v4")).file(CASE, "small")


def test_both_forms_of_attention_agree(small):
    """Keys and values of all heads, also in parts of the heads, or latent vectors alone."""
    tokens = [*range(2, 42)]
    with load_model(small) as model:
        wanted = model.forward(tokens)
        for block in model.network.blocks:
            mixer = block.mixer
            assert isinstance(mixer, MLA) and mixer.sinks is not None and mixer.gate is not None
            mixer.spec = replace(mixer.spec, absorb=1)
        torch.testing.assert_close(model.forward(tokens), wanted, rtol=0, atol=1e-5)
        for block in model.network.blocks:
            block.mixer._heads_at_a_time = lambda keys: 3
        torch.testing.assert_close(model.forward(tokens), wanted, rtol=0, atol=1e-5)
        for block in model.network.blocks:
            block.mixer.sinks.fill_(-1e9)  # nothing
        assert (model.forward(tokens) - wanted).abs().max() > 1e-3


def test_what_no_kernel_evaluates_says_so(small):
    """Also without the streams that keep all layers from them."""
    with load_model(small) as model:
        for block in model.network.blocks:
            mixer = block.mixer
            assert isinstance(mixer, MLA)
            branch = Branch(block.branches[0].norm, mixer, mixer=True)
            with pytest.raises(Slow, match="sinks, or gates of elements"):
                check_description(branch)
            mixer.top_k, mixer.indexer = 0, None
            with pytest.raises(NotPlanned, match="sinks, or gates of elements"):
                plan_latent(SimpleNamespace(memory=None), mixer, None)  # pyright: ignore[reportArgumentType]  refused before


def test_streams_keep_what_they_are():
    n, width, rows = 3, 5, 4
    random = torch.Generator().manual_seed(1)
    fn = torch.randn(2 * n, n * width, generator=random)
    base, scale = torch.randn(2 * n, generator=random), torch.tensor([0.5, 0.25])
    spec = StreamSpec(n, 0, 0.125, 1e-5)
    weights = StreamWeights(spec, fn=lambda x: x @ fn.T, scale=scale, base=base, name="hc_attn")  # pyright: ignore[reportArgumentType]  a product
    c = KeepingConnection(weights, 1.5)
    h = torch.randn(rows, n * width, generator=random)
    y = torch.randn(rows, width, generator=random)
    read, shares = c.before(h)
    after = c.after(h, y, shares).unflatten(1, (n, width))
    for row in range(rows):
        numbers = fn @ (h[row] / (h[row].square().mean() + 1e-5).sqrt())
        for k in range(n):
            share = 1.5 * torch.sigmoid(0.25 * numbers[n + k] + base[n + k]) + 0.125
            wanted = h[row].view(n, width)[k] + share * y[row]
            torch.testing.assert_close(after[row, k], wanted)
        a = torch.sigmoid(0.5 * numbers[:n] + base[:n]) + 0.125
        torch.testing.assert_close(read[row], a @ h[row].view(n, width))
    assert [*c.tensors] == [f"hc_attn_{part}.weight" for part in ("fn", "scale", "base")]


@pytest.mark.parametrize(
    "keys, error, words",
    [
        (
            {"attention.indexer.types": array(ValueType.BOOL, [False, True, True])},
            ConfigError,
            "the first layer has no indexer",
        ),
        (
            {"attention.indexer.types": array(ValueType.BOOL, [True, True, True])},
            IqforgeError,
            "blk.2.indexer",
        ),
        ({"hyper_connection.magnitude": f32(0.0)}, ConfigError, "hyper_connection.magnitude' is 0"),
        ({"hyper_connection.magnitude": None}, IqforgeError, "hyper_connection.magnitude"),
        ({"hyper_connection.count": u32(2)}, MalformedFileError, "output_hc_fn.weight"),
        ({"attention.value_length_mla": u32(8)}, MalformedFileError, "attn_gate.weight|attn_v_b"),
    ],
)
def test_files_that_contradict_themselves(small, tmp_path, keys, error, words):
    with open_gguf(small) as source:
        changed = {f"hy_v4.{key}": value for key, value in keys.items()}
        path = write_gguf(tmp_path / "changed.gguf", source, metadata=changed)
    with pytest.raises(error, match=words):
        load_model(path).close()
