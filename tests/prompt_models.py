"""Models whose prompts take the prompt path without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import iqforge
import numpy as np
import pytest
import torch
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.model import Model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.latent import LatentCache
from iqforge.runtime.state.recurrent import RecurrentState
from iqforge.runtime.state.sequence import State

from . import prompt_on_cpu
from .step_graphs_on_cpu import CPU
from .tiny_cases import CASES, WIDE, Sizes
from .tiny_models import HALF, make_tiny_model

TOKENS = torch.from_numpy(np.random.default_rng(4).integers(0, 512, (3, 21)))
PRECISION = {"rtol": 0.01, "atol": 0.01}  # of activations in float16


@pytest.fixture
def opened(monkeypatch):
    """Return opened(spec, options of the model), which returns (model, context, its prompt
    path).
    """
    prompt_on_cpu.install(monkeypatch)
    models, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)

    def make(
        spec: str, settings: CacheSettings | None = None, **options
    ) -> tuple[Model, Context, PromptPath]:
        models.append(Model(SyntheticSource(spec), CPU, cache=settings, **options))
        context = Context(CPU, torch.float16, settings, ubatch=9)
        return models[-1], context, PromptPath(models[-1].network, context)

    yield make
    torch.set_num_threads(threads)
    for model in models:
        model.close()


def normed(model: Model, h: torch.Tensor) -> torch.Tensor:
    return model.network.output_norm(h)


def memory_of(state: State) -> list[torch.Tensor]:
    """Return all memory of a sequence."""
    found = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            found += [layer.inputs, layer.memory]
        elif isinstance(layer, LatentCache):
            found += [layer.rows.k, *([] if layer.index_keys is None else [layer.index_keys.k])]
        elif layer is not None:
            found += [layer.k, layer.v]
    return found


def _without_experts(sizes: Sizes) -> dict[str, Any]:
    config = CASES["deepseek_v3"].config(sizes)
    return {**config, "first_k_dense_replace": config["num_hidden_layers"]}


DENSE = replace(CASES["deepseek_v3"], config=_without_experts)


@pytest.fixture
def latent(tmp_path):
    """(f32 file, token ids) of a random DeepSeek V3 with dense layers, made before anything is
    replaced. The rounding of encoded keys would change choices of experts.
    """
    tiny = make_tiny_model(DENSE, WIDE, tmp_path / "hf", HALF)
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    return tmp_path / "f32.gguf", tiny.tokens
