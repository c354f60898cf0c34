"""Prompts whose products read packed experts, as on Hopper, without a GPU: kernels are plain torch
(prompt_on_cpu.py), all other code is real.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from iqforge.formats.values import boolean, u32
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath

from . import prompt_models, prompt_on_cpu
from .prompt_models import PRECISION, TOKENS, normed
from .step_graphs_on_cpu import CPU

opened = prompt_models.opened  # a fixture


@pytest.mark.parametrize("gated", [False, True])
def test_packed_experts_next_to_a_shared_one(monkeypatch, opened, gated):
    """Its rows are in the order of columns, and are no multiple of 128: launched and from graphs,
    they give what experts do that are decoded first.
    """
    shape = replace(
        SHAPES["qwen3moe-tiny"],
        architecture="qwen2moe" if gated else "glm4moe",
        width=320,
        head_norms=False,
        shared=256,
        shared_gate=gated,
        choice_bias=not gated,
        ffn_norm="ffn_norm" if gated else "post_attention_norm",
        keys={
            "expert_shared_feed_forward_length": u32(256),
            "expert_shared_count": u32(1),
            "expert_gating_func": u32(1 + (not gated)),
            "expert_weights_norm": boolean(True),
        },
    )
    monkeypatch.setitem(SHAPES, "shared-expert", shape)
    model, context, path = opened("shared-expert:Q8_0")
    assert context.slow  # experts are decoded first
    prompt_on_cpu.reads_packed_experts(monkeypatch)
    prompt_on_cpu.captures(monkeypatch)
    packed = PromptPath(model.network, here := Context(CPU, torch.float16, ubatch=63))
    assert not here.slow
    for shift in range(3):
        tokens = (TOKENS + shift) % model.n_vocab
        expected = normed(model, path.run(tokens, 0)).clone()
        torch.testing.assert_close(normed(model, packed.run(tokens, 0)), expected, **PRECISION)
    assert prompt_on_cpu.Graph.replays > 0
