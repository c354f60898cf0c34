"""Infinity and NaN in a model's tensors or activations: the error names the tensor, wherever it
is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import NonFiniteError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import Source, TensorInfo, WrappedSource
from iqforge.runtime.model import Model

from .shared import shared
from .tiny_checkpoint import PROSE

INFINITY, NAN = float("inf"), float("nan")
# One of every kind of layer; all their tensors are F32.
MODELS = (
    "deepseek_v3",
    "gemma4_e",
    "gemma4_moe",
    "glm4_moe",
    "gpt_oss_bf16",
    "phi3",
    "qwen2",
    pytest.param("qwen3_next", marks=pytest.mark.full),  # 9 s
)


class Spoiled(WrappedSource):
    """A model whose tensor `name` has `value` as the first element of every row."""

    def __init__(self, inner: Source, name: str, value: float):
        super().__init__(inner)
        self.tensors, self.name, self.value = inner.tensors, name, value

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return tensor

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        rows = np.array(super().read_rows(tensor, start, stop))
        if tensor.name == self.name:
            rows.view(np.float32)[:, 0] = self.value
        return rows


def logits(source: Source, n: int = 12) -> torch.Tensor:
    model = Model(source)
    return model.extend(torch.arange(3, 3 + n), model.new_state(64))


@pytest.mark.parametrize("name", MODELS)
def test_the_error_names_the_tensor(name):
    with open_gguf(shared(f"golden/convert/{name}/expected-f32.gguf")) as source:
        model = Model(source)
        used = [t for t in source.tensors if model.weights.uses(t.name)]
        assert len(used) > 10
        for i, tensor in enumerate(used):
            with pytest.raises(NonFiniteError) as raised:
                logits(Spoiled(source, tensor.name, (INFINITY, NAN)[i % 2]))
            assert raised.value.tensor == tensor.name
            assert str(source.path) in str(raised.value)


@pytest.mark.parametrize("name", ["blk.1.exp_probs_b.bias", "blk.0.attn_sinks.weight"])
def test_minus_infinity_leaves_out_experts_and_sinks(name):
    """It is how a pruned expert is never chosen, and how a head has no sink."""
    folder = "gpt_oss_bf16" if "sinks" in name else "deepseek_v3"
    with open_gguf(shared(f"golden/convert/{folder}/expected-f32.gguf")) as source:
        assert logits(Spoiled(source, name, -INFINITY)).isfinite().all()


def test_every_way_to_evaluate_checks_the_output_matrix():
    with open_gguf(shared("golden/convert/llama/expected-f32.gguf")) as source:
        model = Model(Spoiled(source, "output.weight", INFINITY))
        tokens, states = torch.arange(3, 9), [model.new_state(64) for _ in range(2)]
        for evaluate in (
            lambda: model.forward(tokens),
            lambda: model.extend(tokens, states[0]),
            lambda: model.extend(tokens, states[0], all_logits=True),
            lambda: model.extend_together([(tokens, states[0]), (tokens[:2], states[1])]),
            lambda: model.logits(model.hidden(tokens[None])[0]),
        ):
            with pytest.raises(NonFiniteError, match="output.weight"):
                evaluate()


def test_commands_name_the_tensor(tmp_path, capsys):
    text, path = tmp_path / "text.txt", tmp_path / "bad.gguf"
    text.write_text(PROSE)
    path.write_bytes(shared("golden/convert/llama/expected-f32.gguf").read_bytes())
    with open_gguf(path) as source:
        _, offset = source.location("blk.1.ffn_up.weight")
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(np.float32(INFINITY).tobytes())
    chunks = ("-f", text, "-c", 32, "--chunks", 2)
    for command in (
        ("perplexity", "-m", path, *chunks),
        ("imatrix", "-m", path, "-o", tmp_path / "x.imatrix", *chunks),
        ("generate", "-m", path, "-p", "A model", "-n", 4),
    ):
        assert main([str(argument) for argument in (*command, "--device", "cpu")]) == 1
        told = capsys.readouterr().err
        assert "tensor 'blk.1.ffn_up.weight'" in told and "Traceback" not in told
