"""Which layers run on the reference path while tensors are replaced. No GPU is needed: executors
that count their calls stand for those of a GPU.
"""

from __future__ import annotations

import contextlib

import iqforge
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.formats.types import ggml_type
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.model import load_model

from .tiny_checkpoint import make_tiny_llama
from .tiny_model import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_llama(folder / "hf", n_layers=3)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        path = write_gguf(folder / "model.gguf", source)
    with load_model(path) as opened:
        yield opened


class Counted:
    """A step that runs `step` and notes its layer."""

    def __init__(self, layer, step, calls):
        self.layer, self.step, self.calls = layer, step, calls

    def __call__(self, stream, batch):
        self.calls.append(self.layer)
        self.step(stream, batch)


@pytest.mark.parametrize(
    "name, fast",
    [("blk.1.ffn_up.weight", [0, 0, 2, 2]), ("token_embd.weight", [0, 0, 1, 1, 2, 2])],
)
def test_only_layers_of_replaced_tensors_leave_their_executors(model, monkeypatch, name, fast):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    store, tokens = model.weights.store, torch.arange(12).reshape(2, 6)
    context = Context(torch.device("cpu"), torch.float32, replaced=store.replaced)
    path, calls = PromptPath(model.network, context), []
    path._steps = [(layer, Counted(layer, step, calls)) for layer, step in path._steps]
    path._observed = path._steps
    path._narrows = 0

    def states():
        h = path.run(tokens, 0)
        return model.network.output_norm(h).view(2, 6, -1)

    before = model.hidden(tokens)
    assert torch.equal(states(), before) and calls == [0, 0, 1, 1, 2, 2]
    tensor = next(one for one in model.source.tensors if one.name == name)
    x = iqforge.decode(tensor.type, model.source.read_rows(tensor, 0, tensor.n_rows), tensor.n_cols)
    type = ggml_type("Q4_0")
    store.replace(name, type, iqforge.encode(type, x))
    try:
        calls.clear()
        after = model.hidden(tokens)
        assert torch.equal(states(), after) and calls == fast
        assert not torch.equal(after, before)
    finally:
        store.restore(name)
    assert torch.equal(states(), before) and not store.replaced
