"""Placement of tensors, its memory, and the switches that change how layers are evaluated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import DeviceError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.tensor_names import TensorName
from iqforge.runtime import memory
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.commands.flags import model_notes
from iqforge.runtime.layers.attend import attend, attend_with_scores
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.placement import CPU, Placement, Request, fit, parse_overrides
from iqforge.runtime.weights.resident import Resident, ResidentMatrix
from iqforge.runtime.weights.stacked_linear import ExpertLinear
from iqforge.runtime.weights.switches import Switches, parse_on_off, parse_ser

from .tiny_checkpoint import make_tiny_qwen3moe
from .tiny_model import write_gguf

CUDA = torch.device("cuda", 0)
TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 30).tolist()]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_tiny_qwen3moe(folder / "hf", tied=True, n_heads=4, n_kv_heads=2)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        return write_gguf(folder / "moe.gguf", source)


# ---- placement


def test_layers():
    names = [
        "token_embd.weight",
        *(f"blk.{i}.attn_q.weight" for i in range(4)),
        "output_norm.weight",
        "output.weight",
    ]

    def on_gpu(request):
        place = Placement(CUDA, 4, request)
        assert all(place.of(name) == place.home(name) for name in names)
        return "".join("G" if place.of(name) == CUDA else "c" for name in names)

    assert on_gpu(Request()) == "GGGGGGG"
    assert on_gpu(Request(gpu_layers=5)) == "GGGGGGG"
    assert on_gpu(Request(gpu_layers=4)) == "cGGGGcc"
    assert on_gpu(Request(gpu_layers=1)) == "ccccGcc"  # the last ones
    assert on_gpu(Request(gpu_layers=0)) == "ccccccc"
    assert Placement(CPU, 4).of(names[1]) == CPU


def test_experts_and_patterns():
    place = Placement(CUDA, 4, Request(cpu_experts=2))
    for name, expert in (
        ("blk.1.ffn_up_exps.weight", True),
        ("blk.1.ffn_gate_up_exps.weight", True),
        ("blk.1.ffn_down.3.weight", True),
        ("blk.1.ffn_gate_inp.weight", False),
        ("blk.1.ffn_down.weight", False),
        ("blk.1.ffn_up_shexp.weight", False),
    ):
        is_expert = TensorName.parse(name).expert_layer is not None
        assert is_expert == expert and (place.of(name) == CPU) == expert
        assert place.of(name.replace("blk.1", "blk.2")) == CUDA and place.home(name) == CUDA
    overrides = parse_overrides(r"blk\.[01]\.ffn_.*=CPU,ffn_down=CUDA1, attn_k = cpu")
    place = Placement(CUDA, 4, Request(overrides=overrides, gpu_layers=2))
    assert place.of("blk.0.ffn_down.weight") == CPU  # the first pattern decides
    assert place.of("blk.3.ffn_down.weight") == torch.device("cuda", 1)
    assert place.of("blk.0.attn_q.weight") == CPU and place.of("blk.3.attn_q.weight") == CUDA


@pytest.mark.parametrize(
    "text",
    [
        "attn",
        "=CPU",
        "attn=GPX",
        "attn=CUDAx",
        "(=CPU",
        "a=CPU,,b=CPU",
        "a=GPX,b=CPU",
        "a=CPU,",
        "a=CPU,b",
        "",
    ],
)
def test_patterns_that_are_none(text):
    with pytest.raises(UsageError, match="-ot"):
        parse_overrides(text)


@pytest.mark.parametrize("number", ["128", "256", "9" * 30])
def test_devices_that_no_machine_has(number):
    """In eight bits, 256 would be device 0."""
    with pytest.raises(
        UsageError, match=f"-ot puts tensors on cuda:{number}, which is not there: here"
    ):
        parse_overrides(f"a=CUDA{number}")


def test_patterns_with_commas_and_unused_ones():
    overrides = parse_overrides(r"blk\.\d{1,3}\.ffn_up=CPU,b(?=lk)=CUDA1,nothing=CPU")
    assert [pattern for pattern, _ in overrides] == [r"blk\.\d{1,3}\.ffn_up", "b(?=lk)", "nothing"]
    place = Placement(CUDA, 4, Request(overrides=overrides))
    assert place.of("blk.12.ffn_up.weight") == CPU and place.of(
        "blk.1.attn_q.weight"
    ) == torch.device("cuda", 1)
    assert place.unused(["blk.12.ffn_up.weight", "output.weight"]) == ["nothing"]


def test_patterns_without_a_tensor_are_reported(moe):
    """A warning names them on a GPU. On the CPU one line says that overrides have no effect."""
    request = Request(overrides=parse_overrides("ffn_up_exps=CPU,ffn_upp=CPU"))
    with load_model(moe) as model:
        weights = SimpleNamespace(
            placement=Placement(CUDA, 2, request), switches=model.weights.switches
        )
        for device, expected in (
            (CUDA, [("-ot 'ffn_upp'", "no tensor has such a name")]),
            (CPU, []),
        ):
            assert (
                model_notes(
                    SimpleNamespace(
                        device=device,
                        weights=weights,
                        source=model.source,
                        hyperparameters=model.hyperparameters,
                        network=model.network,
                        cache=model.cache,
                    )
                )
                == expected
            )


@pytest.mark.parametrize(
    "free, expected",
    [
        (1000, Request()),
        (999, Request(cpu_experts=1)),
        (900, Request(cpu_experts=1)),
        (650, Request(cpu_experts=4)),
        (600, Request(cpu_experts=4)),
        (599, Request(gpu_layers=4, cpu_experts=4)),
        (500, Request(gpu_layers=4, cpu_experts=4)),
        (299, Request(gpu_layers=1, cpu_experts=4)),
        (1, Request(gpu_layers=0, cpu_experts=4)),
    ],
)
def test_fit(free, expected):
    """Four layers have 100 bytes of experts and 100 others each; 200 bytes are outside of layers,
    100 of them with the output.
    """
    names = [f"blk.{i}.ffn_up_exps.weight" for i in range(4)]

    def needed(place: Placement) -> int:
        layers = [i for i in range(4) if place.layer(i) == CUDA]
        frame = 100 * (place.home("output.weight") == CUDA) + 100 * bool(layers)
        return frame + sum(100 + 100 * (place.of(names[i]) == CUDA) for i in layers)

    assert fit(CUDA, 4, 0, needed, free, names).request == expected
    assert fit(CUDA, 4, 1, needed, free + (1 << 20), names).request == expected


@pytest.mark.parametrize(
    "free, expected",
    [
        (1000, Request()),
        (999, Request(cpu_experts=3)),
        (849, Request(gpu_layers=3, cpu_experts=4)),
    ],
)
def test_fit_where_the_first_experts_on_the_cpu_take_memory(free, expected):
    """As places take, to which they are copied. The first layer has no experts."""
    names = [f"blk.{i}.ffn_up_exps.weight" for i in range(1, 4)]

    def needed(place: Placement) -> int:
        on_cpu = sum(place.of(name) != CUDA for name in names)
        layers = place.request.gpu_layers
        return 1000 + 150 * bool(on_cpu) - 100 * on_cpu - 10 * (4 - min(layers, 4))

    assert fit(CUDA, 4, 0, needed, free, names).request == expected


def test_fit_stands_alone():
    for other in ({"gpu_layers": 3}, {"cpu_experts": 1}, {"overrides": parse_overrides("a=CPU")}):
        with pytest.raises(UsageError, match="--fit"):
            Request(fit_margin=10, **other)


# ---- memory


def test_numbers_of_a_table():
    source = SyntheticSource("llama-tiny:Q8_0")
    with Model(source, context=300) as model:
        [m] = model.memory(rows=64)
        matrices = sum(t.n_bytes for t in source.tensors if len(t.shape) > 1)
        assert m.device == CPU and m.weights - matrices in range(20000)  # vectors are in it
        # Positions, layers, k and v, heads, head size, bytes.
        assert m.cache == 512 * 2 * 2 * 2 * 64 * 2
        assert m.cache == model.new_state(300).nbytes
        assert 64 * 512 * 4 < m.compute < 32 << 20 and m.total == m.weights + m.cache + m.compute
        quantized = memory.estimate(
            model.network, model.weights, capacity=512, settings=CacheSettings("q8_0", "q4_0")
        )[0].cache
        assert (
            quantized == 512 * 2 * 2 * 2 * (34 + 18)
            and quantized == model.new_state(512, CacheSettings("q8_0", "q4_0")).nbytes
        )
    lines = memory.table([m])
    assert len(lines) == 2 and f"{m.total / 2**20:.1f}" in lines[1] and "weights" in lines[0]


def test_too_little_memory_has_numbers():
    fine = memory.DeviceMemory(CUDA, 100 << 20, 20 << 20, 3 << 20, 123 << 20)
    memory.check([fine, memory.DeviceMemory(CPU, 1 << 40, 0, 0, 1)])  # the CPU's weights are mapped
    with pytest.raises(
        DeviceError,
        match=(
            "122 MiB free, the model takes 123 MiB.*weights 100, cache 20, compute 3.*--n-cpu-moe"
        ),
    ):
        memory.check([memory.DeviceMemory(CUDA, 100 << 20, 20 << 20, 3 << 20, 122 << 20)])


def test_memory_that_runs_out_has_a_name(moe, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("a page of numbers")

    with load_model(moe) as model:
        state = model.new_state(10)
        monkeypatch.setattr("iqforge.runtime.network.network.Network.hidden", full)
        for evaluate in (lambda: model.forward(TOKENS), lambda: model.extend([1, 2], state)):
            with pytest.raises(DeviceError, match="MiB free: evaluate fewer tokens at a time"):
                evaluate()


@pytest.mark.parametrize("type", ["IQ4_K", "IQ4_K_R4", "F32"])
def test_resident_matrices_are_those_of_the_file(moe, tmp_path, type, monkeypatch):
    """Pieces, experts, two tensors merged into one, and rows of a table are compared on the CPU,
    which has a reference for packing and unpacking.
    """
    with open_gguf(moe) as source:
        path = write_gguf(
            tmp_path / "q.gguf",
            source,
            lambda t: type if len(t.shape) > 1 and "ffn_gate_inp" not in t.name else "F32",
        )
    monkeypatch.setattr("iqforge.runtime.weights.resident.PART_BYTES", 4 * 256 * 20)
    monkeypatch.setattr("iqforge.runtime.weights.resident._READ_BYTES", 3000)
    with load_model(path) as model:
        tensors = {t.name: t for t in model.source.tensors}
        by_name = {p.name: p for p in model.weights.parameters}
        gate, up = (tensors[f"blk.0.ffn_{x}_exps.weight"] for x in ("gate", "up"))
        merged = Resident(model.source, [gate, up], 4, CPU)
        for expert in range(4):
            matrix = ResidentMatrix(merged, expert)
            parts = list(matrix.parts())
            assert [start for start, _ in parts] == list(
                np.cumsum([0] + [len(part) for _, part in parts])[:-1]
            ) and len(parts) > 1
            expected = torch.cat(
                [part for t in (gate, up) for _, part in by_name[t.name].matrices[expert].parts()]
            )
            assert torch.equal(torch.cat([part for _, part in parts]), expected)
        # As experts of old files.
        apart = Resident(model.source, [tensors[f"blk.0.attn_{x}.weight"] for x in "kv"], 2, CPU)
        for index, x in enumerate("kv"):
            expected = torch.cat(
                [part for _, part in by_name[f"blk.0.attn_{x}.weight"].matrix.parts()]
            )
            assert torch.equal(
                torch.cat([part for _, part in ResidentMatrix(apart, index).parts()]), expected
            )
        assert apart.packed is None or apart.packed.n_matrices == 2
        table = ResidentMatrix(Resident(model.source, [tensors["token_embd.weight"]], 1, CPU))
        ids = torch.tensor([7, 0, 299, 7])
        assert torch.equal(table.gather(ids), by_name["token_embd.weight"].matrix.gather(ids))
        assert table.resident.nbytes >= 0.9 * table.resident.stored_bytes


# ---- switches


def test_merged_gate_and_up(moe):
    with load_model(moe) as plain, load_model(moe, switches=Switches(merge_gate_up=True)) as merged:
        assert torch.equal(plain.forward(TOKENS), merged.forward(TOKENS))
        assert any(
            isinstance(p, ExpertLinear) and p.role == "ffn_gate_up_exps"
            for p in merged.weights.parameters
        )
        seen: dict[str, list] = {}
        for model, names in ((plain, []), (merged, [])):
            with model.observe(lambda name, x, experts: names.append(name)):
                model.forward(TOKENS)
            seen[str(len(seen))] = sorted(names)
        assert seen["0"] == seen["1"]  # an importance matrix has the tensors of the file


def test_smart_expert_reduction(moe):
    def routed(ser):
        with load_model(moe, switches=Switches(ser=ser)) as model:
            layer = model.network.blocks[0].branches[1].module
            layer.router.spec = replace(layer.router.spec, n_used=3)
            x = torch.randn(
                50,
                model.network.output_norm.weight.numel(),
                generator=torch.Generator().manual_seed(1),
            )
            return layer.router.scores(x), *layer.router(x), layer(x), layer, x

    probabilities, chosen, _, full, layer, x = routed(None)
    for k, t in ((1, 1.0), (2, 1.0), (1, 0.5), (2, 0.8), (3, 1.0), (1, 0.0)):
        _, chosen_here, reduced, y, layer, x = routed((k, t))
        best = probabilities.gather(1, chosen)
        kept = (best > t * best[:, :1]) | (torch.arange(3) < k)
        expected = best * kept / (best * kept).sum(1, keepdim=True)
        assert torch.equal(chosen_here, chosen)
        torch.testing.assert_close(reduced, expected)
        by_hand = torch.zeros_like(y)
        for expert in range(4):
            w = (expected * (chosen == expert)).sum(1)
            counts = torch.zeros(4, dtype=torch.int64)
            counts[expert] = len(x)
            by_hand += w[:, None] * layer.experts(x, counts)
        torch.testing.assert_close(y, by_hand, rtol=1e-4, atol=1e-5)
        assert (kept.all(1) == ((y - full).abs().amax(1) < 1e-5)).all() or k == 3
    assert 0 < int((routed((1, 0.5))[2] > 0).sum()) < 150


def test_dropped_experts_are_not_seen_by_an_importance_matrix(moe):
    rows = []
    with (
        load_model(moe, switches=Switches(ser=(1, 1.0))) as model,
        model.observe(lambda name, x, experts: rows.append((name, len(x)))),
    ):
        model.forward(TOKENS)
    assert {n for name, n in rows if "_exps" in name} == {len(TOKENS)}


@pytest.mark.parametrize("n, total", [(7, 7), (1, 9), (4, 9)])
def test_attention_with_scores(n, total):
    q, k, v = torch.randn(2, n, 6, 16), torch.randn(2, total, 2, 16), torch.randn(2, total, 2, 24)
    expected = attend(q, k, v, 0.3)
    torch.testing.assert_close(attend_with_scores(q, k, v, 0.3), expected)
    big_q, big_k = q.repeat(1, 1, 100, 1), k.repeat(1, 1, 100, 1)
    big = attend_with_scores(big_q, big_k, v.repeat(1, 1, 100, 1), 0.3)
    torch.testing.assert_close(
        attend_with_scores(big_q, big_k, v.repeat(1, 1, 100, 1), 0.3, most_mib=1), big
    )


def test_attention_buffer_bounds_the_heads_at_a_time(monkeypatch):
    seen = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor,
        "softmax",
        lambda self, dim: seen.append(self.numel() * 4) or softmax(self, dim),
    )
    q, k = torch.randn(1, 128, 32, 8), torch.randn(1, 128, 4, 8)
    attend_with_scores(q, k, k, 0.3, most_mib=1)
    assert max(seen) <= 1 << 20 and len(seen) == 2


def test_flash_attention_off_through_a_model(moe):
    with (
        load_model(moe) as on,
        load_model(moe, switches=Switches(flash_attention=False, attention_buffer=1)) as off,
    ):
        torch.testing.assert_close(off.forward(TOKENS), on.forward(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "text, expected", [("6,0.4", (6, 0.4)), (" 1 , 1", (1, 1.0)), ("-1,0", None), ("0,0", None)]
)
def test_ser_words(text, expected):
    assert parse_ser(text) == expected


def test_words_that_are_none():
    for bad in ("6", "a,b", "6,", "", "6,0.4,2"):
        with pytest.raises(UsageError):
            parse_ser(bad)
    for bad in ((0, 0.5), (1, -0.1), (1, 1.5)):
        with pytest.raises(UsageError):
            Switches(ser=bad)
    assert [parse_on_off("-fa", word) for word in (True, "on", "0", "off", "auto", "1")] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]


def test_perplexity_with_caches_and_switches(moe, tmp_path, capsys):
    """A coarser cache changes more. Switches without effect are named with the reason, and the
    others change only what they say.
    """
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 100)

    def ppl(*words) -> tuple[float, str]:
        assert (
            main(
                [
                    "perplexity",
                    "--device",
                    "cpu",
                    "-m",
                    str(moe),
                    "-f",
                    str(text),
                    "-c",
                    "64",
                    "--chunks",
                    "4",
                    *words,
                ]
            )
            == 0
        )
        out, err = capsys.readouterr()
        return float(out.split("PPL = ")[1].split()[0]), err

    plain, err = ppl()
    assert "note" not in err
    far = [
        abs(ppl("-ctk", type, "-ctv", type)[0] / plain - 1)
        for type in ("f32", "f16", "q8_0", "q4_0")
    ]
    assert far[0] == 0 and far[1] < 1e-3 and far[2] < 0.02 and far[3] > far[1]
    for words, reason in (
        (["-mla", "2"], "latent"),
        (["-fmoe"], "fused"),
        (["-rtr"], "interleaved"),
        (["-mqkv"], "one launch"),
        (["-ger"], "group"),
        (["-gr"], "graph"),
        (["-amb", "10"], "flash"),
        (["-ngl", "5"], "--device cpu"),
        (["-khad"], "not quantized"),
    ):
        value, err = ppl(*words)
        assert (
            value == plain
            and f"note: {words[0]}" in err
            and reason in err
            and "nothing here" in err
        )
    for words in (["-muge"], ["-ub", "64"], ["-fa", "off"], ["-fa", "0", "-amb", "1"], ["-fa"]):
        value, err = ppl(*words)
        assert abs(value / plain - 1) < 1e-5 and "note" not in err
    assert abs(ppl("-ser", "1,1")[0] / plain - 1) > 1e-4
