"""What the fast path is announced to take of a GPU's memory, for ranks that lack a part and for
layers with windows.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from iqforge.cuda_kernels.prompt import few, flash_plan
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.planned import buffer_bytes, input_sizes, kept_bytes, output_sizes
from iqforge.runtime.layers.absent import AbsentRows
from iqforge.runtime.layers.dense_and_experts import DenseAndExperts
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.experts import moe_layers
from iqforge.runtime.split_report import split_report
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from .tiny_model import write_gguf

CPU = torch.device("cpu")
CONTEXT = 4096


def test_a_rank_without_experts_or_without_the_dense_layer_takes_less():
    with Model(SyntheticSource("gemma4:Q8_0"), CPU) as model:
        blocks = model.network.blocks[:1]

        def announced() -> int:
            n_bytes = buffer_bytes(blocks, model.network.width, 512, 512, CacheSettings(), CPU)
            return n_bytes + kept_bytes(blocks, CacheSettings())

        [both] = [
            branch.module
            for branch in blocks[0].branches
            if isinstance(branch.module, DenseAndExperts)
        ]
        whole = announced()
        dense, both.dense = both.dense, AbsentRows()
        without_dense = announced()
        both.dense, both.moe = dense, None
        assert 0 < announced() < without_dense <= whole
        assert len(list(moe_layers(model.network))) == len(model.network.blocks) - 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_layers_with_a_window_take_what_is_announced(fast, full, monkeypatch):
    """Kernels read caches whose positions follow each other, so they keep all of them."""
    monkeypatch.setattr(Model, "is_fast", fast)
    source, switches = SyntheticSource("gpt-oss-20b:MXFP4,layers=2"), Switches(swa_full=full)
    with Model(source, CPU, context=CONTEXT, switches=switches) as model:
        [announced] = model.memory()
        state = model.new_state(CONTEXT)
        assert announced.cache == sum(layer.nbytes for layer in state.layers)
        keys_and_values = 2 * CONTEXT * 8 * 64 * 2  # of a layer with all positions, f16
        whole, windowed = 2 * keys_and_values, keys_and_values * (1 + 704 / CONTEXT)
        assert announced.cache == (whole if fast or full else windowed)
        planned = split_report(source, (1, 1), context=CONTEXT, switches=switches)
        assert sum(planned.cache) == whole


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("of_up", ["Q8_0", "Q4_0"])
def test_experts_of_two_types_are_decoded_first(monkeypatch, tmp_path, of_up, merged):
    """On Hopper, too, where products of one type read packed experts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(few, "is_used", lambda device: False)  # what it needs would be most of all
    path, gpu = tmp_path / "model.gguf", torch.device("cuda")

    def type_of(tensor) -> str:
        return of_up if "ffn_up_exps" in tensor.name else tensor.type.name

    write_gguf(path, SyntheticSource("qwen3moe-tiny:Q8_0"), type_of)
    with load_model(path, switches=Switches(merge_gate_up=merged)) as model:
        blocks, width = model.network.blocks, model.network.width
        n_bytes = buffer_bytes(blocks, width, 64, 64, CacheSettings(), gpu)
        for moe in moe_layers(model.network):
            down, n = moe.experts.down, moe.spec.n_experts
        decoded = 2 * n * 2 * down.cols * width
        assert (n_bytes > decoded) == (of_up == "Q4_0")


def test_sums_of_few_tokens_count(monkeypatch):
    """Where a device has products of few tokens."""
    with Model(SyntheticSource("llama-tiny:Q8_0"), CPU) as model:
        arguments = model.network.blocks, model.network.width, 64, 64, CacheSettings(), CPU
        without = buffer_bytes(*arguments)
        monkeypatch.setattr(few, "is_used", lambda device: True)
        monkeypatch.setattr(flash_plan, "multiprocessors", lambda device: 132)
        assert buffer_bytes(*arguments) == without + few.workspace_bytes(CPU)
        space = few.workspace(CPU)
        assert few.workspace_bytes(CPU) == sum(x.nbytes for x in space)


def test_decoded_rows_of_the_output_count_where_all_tokens_have_logits():
    with Model(SyntheticSource("llama-tiny:Q8_0"), CPU) as model:
        output = model.network.output
        sizes = output_sizes(output, 64)
        assert sizes == {"weights": 512 * 256 * 2, "logits": 64 * 512 * 4}
        arguments = model.network.blocks, model.network.width, 64, 64, CacheSettings(), CPU
        without, with_logits = (buffer_bytes(*arguments, more) for more in ([], [sizes]))
        assert without < with_logits <= without + sum(sizes.values())


def test_inputs_of_layers_count():
    """Decoded weights share their memory with those of other layers."""
    projection = SimpleNamespace(rows=3 * 64, cols=256)
    sizes = input_sizes(SimpleNamespace(projection=projection), 64)  # pyright: ignore[reportArgumentType]  what is read of it
    assert sizes["layer inputs"] == 64 * 192 * 2 and sizes["weights"] == 192 * 256 * 2
    with Model(SyntheticSource("llama-tiny:Q8_0"), CPU) as model:
        arguments = model.network.blocks, model.network.width, 64, 64, CacheSettings(), CPU
        without, with_inputs = (buffer_bytes(*arguments, more) for more in ([], [sizes]))
    assert with_inputs == without + sum(sizes.values()) - sizes["weights"]
