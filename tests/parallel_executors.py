"""A rank that runs the executors of the fast path on the CPU: `python parallel_executors.py FOLDER
SPEC...`. Kernels are plain torch; sums go through the group of ranks. After a SPEC, `@columns` says
how experts are split, and `@columns+cpu` also that they are on the CPU beside the device.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from iqforge.formats.values import f32, u32
from iqforge.runtime.bench.hybrid_shapes import BesideShape, HybridShape, NemotronShape
from iqforge.runtime.bench.mixer_sizes import (
    ConvSizes,
    KimiDeltaSizes,
    LatentSizes,
    StateSpaceSizes,
)
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.bench.window_shapes import CohereShape
from iqforge.runtime.cpu.offloaded import OffloadedExperts
from iqforge.runtime.cuda.common import context as context_module
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt import path as prompt_path
from iqforge.runtime.cuda.prompt.common import stream as prompt_stream
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step import launches as step_launches
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.model import Model
from iqforge.runtime.network.experts import moe_layers
from iqforge.runtime.parallel import group as group_module
from iqforge.runtime.parallel.group import Group
from iqforge.runtime.parallel.ranks import Ranks
from iqforge.runtime.parallel.share import Share
from iqforge.runtime.split_model import make_plan, make_stage

from tests import prompt_on_cpu  # pyright: ignore[reportMissingImports]  see above
from tests.offloaded_on_cpu import (  # pyright: ignore[reportMissingImports]
    Device,
    Driver,
    install_copies,
)
from tests.step_graphs_on_cpu import CPU, Graph, kernel  # pyright: ignore[reportMissingImports]

SHAPES["qwen2moe-tiny"] = replace(  # with a gated shared expert
    SHAPES["qwen3moe-tiny"],
    architecture="qwen2moe",
    head_norms=False,
    shared=512,
    shared_gate=True,
    keys={"expert_shared_feed_forward_length": u32(512)},
)
SHAPES["minimax-tiny"] = replace(  # with norms over all heads
    SHAPES["qwen3moe-tiny"],
    architecture="minimax-m2",
    head_norms=False,
    joined_norms=True,
    rotated=64,
    choice_bias=True,
    n_experts=2,  # all are used, so that rounding chooses no others
)
SHAPES["nemotron-tiny"] = NemotronShape(  # every layer of one kind, and experts without a gate
    *("nemotron_h_moe", "tiny", 5, 256, 4, 2, 64, 512, 512, 10000.0, 8192, 1e-5, 2, 2),
    shared=512,
    gated=False,
    pattern="MEM*E",
    recurrent=StateSpaceSizes(16, 32, 64, 2),
    keys={"expert_shared_feed_forward_length": u32(512)},
)
SHAPES["olmo-tiny"] = replace(  # with norms after both halves of a block, and none before them
    SHAPES["llama-tiny"],
    architecture="olmo2",
    llama3_rope=False,
    joined_norms=True,
    attn_norm="",
    ffn_norm="",
    post_norms=("post_attention_norm", "post_ffw_norm"),
)
SHAPES["lfm2-tiny"] = HybridShape(  # with short convolutions
    *("lfm2", "tiny", 2, 256, 4, 2, 64, 512, 512, 10000.0, 8192, 1e-5),
    head_norms=True,
    last_norm="token_embd_norm",
    attending=(1,),
    recurrent=ConvSizes(),
)
SHAPES["falcon-tiny"] = BesideShape(  # attention and state spaces side by side
    *("falcon-h1", "tiny", 2, 256, 2, 1, 128, 512, 512, 10000.0, 8192, 1e-5),
    recurrent=StateSpaceSizes(16, 32, 64, 2, normed=False),
)
SHAPES["kimi-tiny"] = HybridShape(  # Kimi delta attention
    *("kimi-linear", "tiny", 2, 256, 8, 1, 64, 256, 512, 10000.0, 8192, 1e-5, 2, 2),
    n_dense=1,
    dense_hidden=512,
    shared=256,
    rotated=64,
    choice_bias=True,
    latent=LatentSizes(0, 512, 128, 64, 128),
    recurrent=KimiDeltaSizes(8, 32),
    keys={"expert_gating_func": u32(2), "expert_shared_count": u32(1)},
)
SHAPES["ling-tiny"] = replace(  # whose decays have a bound, from one product
    SHAPES["kimi-tiny"],
    architecture="bailingmoe3",
    recurrent=KimiDeltaSizes(8, 32, bound=-5.0, low_rank=False),
)
SHAPES["cohere2-tiny"] = replace(  # attention and feed-forward side by side
    SHAPES["llama-tiny"],
    architecture="cohere2",
    n_layers=4,
    n_heads=2,  # of three ranks, one has no attention
    n_kv_heads=1,
    head=128,
    llama3_rope=False,
    layer_norm=True,
    norm_biases=False,
    side_by_side=True,
    tied=True,
    keys={"attention.sliding_window": u32(16), "logit_scale": f32(0.25)},
)
SHAPES["command-tiny"] = CohereShape(  # attention and experts side by side
    *("cohere2moe", "tiny", 4, 256, 2, 1, 128, 256, 512, 10000.0, 8192, 1e-5, 2, 2),
    n_dense=1,
    dense_hidden=512,
    shared=512,
    layer_norm=True,
    norm_biases=False,
    side_by_side=True,
    tied=True,
    keys={
        "attention.sliding_window": u32(16),
        "expert_gating_func": u32(2),
        "expert_shared_count": u32(2),
        "logit_scale": f32(0.25),
    },
)
TOKENS = torch.from_numpy(np.random.default_rng(4).integers(0, 512, (2, 37)))


class GroupLinks:
    """Sums of steps through the group."""

    missing = None

    def __init__(self, group: Group):
        def total(x, h):
            h += group.sum(x)
            x.zero_()

        def assign(x, h):
            h.copy_(group.sum(x))
            x.zero_()

        def gather(x, out, ends):
            out.copy_(group.gather(x, ends))

        self.sum, self.assign, self.gather = kernel(total), kernel(assign), kernel(gather)


class GroupRowLinks:
    """Sums of prompts through the group, with the norm after them."""

    def __init__(self, group: Group):
        def add_norm(h, weight, eps, out, *, moved, half, delta=None, extra=None, **how):
            names = ("rows", "weights", "shares")
            y, weighted = torch.zeros_like(h), {n: how.pop(n, None) for n in names}
            if weighted["weights"] is not None:
                weighted["extra"] = extra
            elif extra is not None:
                y += extra.float()
            if delta is not None:
                prompt_on_cpu.add_norm(y, None, 0.0, None, delta=delta, **weighted)
            prompt_on_cpu.add_norm(h, weight, eps, out, delta=group.sum(y), **how)
            GroupRowLinks.calls += 1

        self.add_norm = add_norm

    calls = 0

    def fits(self, rows, width, moved):
        return True


def evaluated(model: Model, context: Context) -> dict[str, torch.Tensor]:
    """Return logits of prompts, and of steps of several sizes."""
    for moe in moe_layers(model.network):
        if moe.experts.down.matrices[0].packed is None:  # on the CPU beside the device
            weights = model.weights
            moe.few_rows = OffloadedExperts(moe, weights.store, weights.taps, rounds=False)
    prompt = PromptPath(model.network, context)
    found = {"prompts": prompt.logits(model.network.output_norm(prompt.run(TOKENS, 3)))}
    state = model.new_state(300)
    for piece in TOKENS[0].split(9):  # passes of one size: captured, then replayed
        state.reserve(len(piece))
        h = prompt.run(piece[None], state.n_past, state, last=True)
        state.advance(len(piece))
        found[f"after {state.n_past}"] = prompt.next_logits(h)
    steps, state = StepPath(model.network, context), model.new_state(300)
    context.report_all()
    pieces = TOKENS[0].split([7, 1, 1, 4, 1, 1, 1, 5, 8, 8])
    rows = [steps.extend(piece, state, all_logits=True) for piece in pieces]
    found["steps"] = torch.cat(rows)
    context.close()
    return found


def main() -> None:
    folder, *specs = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    ranks = Ranks.here()
    assert ranks is not None
    group = Group(ranks, CPU, timeout=600)
    patch = pytest.MonkeyPatch()
    prompt_on_cpu.install(patch)
    patch.setattr(group_module, "FEW_ROWS", 4)
    patch.setattr(step_launches, "links_of", lambda network, context: GroupLinks(group))
    patch.setattr(step_launches, "moved", kernel(step_launches.moved))
    report = {}
    for words in specs:
        spec, _, experts = words.partition("@")
        experts, _, place = experts.partition("+")
        beside = pytest.MonkeyPatch()
        if place == "cpu":
            install_copies(beside)
            Driver(beside)
            Device(beside, others=True)
        shares = (1, 1, 2)[-ranks.size :] if ranks.size < 4 else (1,) * ranks.size
        plan = make_plan(SyntheticSource(spec), shares, experts=experts or "auto")
        told: list[str] = []
        with Model(SyntheticSource(spec), CPU, share=Share(plan, ranks.rank, group)) as model:
            share = model.weights.share
            context = Context(CPU, torch.float16, ubatch=9, share=share, verbose=told.append)
            found = evaluated(model, context)
            patch.setattr(prompt_path, "row_links_of", lambda *_: GroupRowLinks(group))
            linked = evaluated(model, Context(CPU, torch.float16, ubatch=9, share=share))
            patch.setattr(prompt_path, "row_links_of", lambda *_: None)
            group.reduce_type = "f16"
            in_halves = evaluated(model, context)
            for module in (context_module, prompt_stream):
                patch.setattr(module, "PIECE_BYTES", 3000)
            in_pieces = evaluated(model, Context(CPU, torch.float16, ubatch=9, share=share))
            for module in (context_module, prompt_stream):
                patch.setattr(module, "PIECE_BYTES", 2**23)
            group.reduce_type = "f32"
        stage = make_stage(SyntheticSource(spec), shares, group, CPU)
        before = Graph.replays
        with Model(SyntheticSource(spec), CPU, stage=stage) as model:
            patch.setattr(step_launches, "links_of", lambda network, context: None)
            by_layers = evaluated(model, Context(CPU, torch.float16, ubatch=9))
            patch.setattr(step_launches, "links_of", lambda network, context: GroupLinks(group))
        n_layers = len(stage.layers)
        captured = Graph.replays - before
        report[words] = {"slow": told, "captured": Graph.replays, "linked": GroupRowLinks.calls}
        report[words] |= {"layers": n_layers, "captured by layers": captured}
        if ranks.rank == 0:
            patch.setattr(step_launches, "links_of", lambda network, context: None)
            with Model(SyntheticSource(spec), CPU) as model:
                whole = evaluated(model, Context(CPU, torch.float16, ubatch=9))
            patch.setattr(step_launches, "links_of", lambda network, context: GroupLinks(group))
            report[words]["errors"] = {
                name: float((found[name] - whole[name]).abs().max() / whole[name].abs().max())
                for name in whole
            }
            report[words]["errors by layers"] = {
                name: float((by_layers[name] - whole[name]).abs().max() / whole[name].abs().max())
                for name in whole
            }
            report[words]["errors with links"] = [
                float((linked[name] - whole[name]).abs().max() / whole[name].abs().max())
                for name in whole
            ]
            report[words]["errors in halves"] = [
                float((some[name] - whole[name]).abs().max() / whole[name].abs().max())
                for some in (in_halves, in_pieces)
                for name in whole
            ]
        digits = {name: x.contiguous().view(torch.int32).sum().item() for name, x in found.items()}
        report[words]["digits"] = digits
        beside.undo()
        group.wait()
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(report))
    group.close()


if __name__ == "__main__":
    main()
