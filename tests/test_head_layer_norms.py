"""LayerNorms of heads with weights for each head (Command R+): decoding steps, ranks, and what is
said of GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import iqforge
import pytest
import torch
from iqforge.runtime.cuda.common.registry import Slow, check_description
from iqforge.runtime.layers.block import AttentionAndFFN
from iqforge.runtime.layers.ffn import PlainFFN
from iqforge.runtime.layers.norm import HeadLayerNorm, RMSNorm
from iqforge.runtime.model import load_model
from iqforge.runtime.split_model import make_plan
from iqforge.runtime.state.cache import CacheSettings

from .thread_ranks import logits_on_ranks
from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model

EXACT = CacheSettings("f32", "f32")


@pytest.fixture(scope="module")
def command_r_plus(tmp_path_factory):
    """(file, token ids, transformers' logits)."""
    folder, base = tmp_path_factory.mktemp("plus"), CASES["cohere"]
    case = replace(base, config=lambda s: base.config(s) | {"use_qk_norm": True})
    tiny = make_tiny_model(case, WIDE, folder / "hf")
    path = iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32")
    return path, tiny.tokens, torch.from_numpy(tiny.logits)


def test_a_norm_is_that_of_each_head():
    random = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=random) for shape in ((5, 4, 24), (4, 24)))
    found = HeadLayerNorm(weight, 0.1)(x)
    for head in range(4):
        centered = x[:, head] - x[:, head].mean(-1, keepdim=True)
        expected = centered / (centered.square().mean(-1, keepdim=True) + 0.1).sqrt()
        torch.testing.assert_close(found[:, head], expected * weight[head])


def test_steps_have_a_program(command_r_plus):
    path, tokens, expected = command_r_plus
    with load_model(path) as model:
        state = model.new_state(len(tokens), EXACT)
        found = [model._step(token, state) for token in tokens]
    assert all(logits is not None for logits in found)
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (0, 1)])
def test_ranks_have_the_weights_of_their_heads(command_r_plus, shares):
    path, tokens, expected = command_r_plus
    with load_model(path) as model:
        plan = make_plan(model.source, shares)
    held = [part.heads for part in plan.layers[0]]
    q_norms = plan.tensors["blk.0.attn_q_norm.weight"].ranges
    assert [part[0] if part else (0, 0) for part in q_norms] == held
    for logits in logits_on_ranks(path, tokens, plan):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_gpus_have_no_kernels_for_them(command_r_plus):
    with load_model(command_r_plus[0]) as model:
        for block in model.network.blocks:
            [branch] = block.branches
            assert isinstance(branch.module, AttentionAndFFN)
            with pytest.raises(Slow, match="norms of heads that subtract the mean"):
                check_description(branch)


def test_gpus_leave_no_part_of_a_layer_out(command_r_plus):
    """What they cannot evaluate side by side is on the reference path."""
    with load_model(command_r_plus[0]) as model:
        [branch] = model.network.blocks[0].branches
        both, norm = branch.module, RMSNorm(branch.norm.weight, 1e-5)
        both.attention.q_norm = both.attention.k_norm = None
        check_description(branch)
        for module in (
            AttentionAndFFN(both.attention, PlainFFN(both.ffn.up, both.ffn.down, both.ffn.spec)),
            AttentionAndFFN(both.ffn, both.ffn),
        ):
            with pytest.raises(Slow, match="FFN side by side"):
                check_description(replace(branch, module=module))
        with pytest.raises(Slow, match="a norm after attention and feed-forward"):
            check_description(replace(branch, post_norm=norm))
