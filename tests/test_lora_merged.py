"""Adapters merged into a model: while it runs, and as a file."""

from __future__ import annotations

import re
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import (
    ArchitectureError,
    IqforgeError,
    MalformedFileError,
    NonFiniteError,
    ShapeError,
    UnsupportedTypeError,
)
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.tools.lora_source import AdapterFile, LoraSource, parse_adapter
from iqforge.formats.types import TYPES
from iqforge.formats.values import f32, string
from iqforge.runtime.options import LoadOptions

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

RANK, ALPHA = 4, 8.0
WEIGHTS = {
    "llama": ["blk.0.attn_q.weight", "blk.0.ffn_down.weight", "token_embd.weight", "output.weight"],
    "moe": ["blk.0.attn_v.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight"],
}
QUANTIZED = ("BF16", "Q8_0", "IQ4_K_R4")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama")
    make_tiny_qwen3moe(folder / "moe")
    paths = {}
    for name in ("llama", "moe"):
        with CheckpointSource(open_checkpoint(folder / name)) as source:
            for type in QUANTIZED:
                # Embeddings are not interleaved.
                plain = "IQ4_K" if type == "IQ4_K_R4" else type
                paths[name, type] = write_gguf(
                    folder / f"{name}-{type}.gguf",
                    source,
                    lambda t: (
                        "F32"
                        if len(t.shape) < 2 or "gate_inp" in t.name
                        else plain
                        if "token_embd" in t.name
                        else type
                    ),
                )
    return paths


def floats(path: Path) -> dict[str, np.ndarray]:
    with open_gguf(path) as file:
        return {
            t.name: decode(
                t.type, file.read_rows(t, 0, t.n_rows), t.n_cols, as_weights=True
            ).reshape(t.shape)
            for t in file.tensors
        }


def write_adapter(
    path: Path,
    model: Path,
    weights: list[str],
    *,
    seed: int = 0,
    metadata: dict | None = None,
    norm: str | None = None,
    change=lambda name, values: values,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write a random adapter and return its halves by weight."""
    rng, halves, tensors = np.random.default_rng(seed), {}, {}
    with open_gguf(model) as file:
        shapes = {t.name: t.shape for t in file.tensors}
    for name in weights:
        *stack, n_out, n_in = shapes[name]
        a = rng.normal(0, 0.05, (*stack, RANK, n_in)).astype(np.float32)
        b = rng.normal(0, 0.5, (*stack, n_out, RANK)).astype(np.float32)
        halves[name] = a, b
        turned = name == "token_embd.weight"  # rows of lora_a are looked up
        tensors[f"{name}.lora_a"] = change(f"{name}.lora_a", b if turned else a)
        tensors[f"{name}.lora_b"] = change(
            f"{name}.lora_b", np.ascontiguousarray(a.T) if turned else b
        )
    if norm is not None:
        tensors[norm] = rng.normal(1, 0.1, shapes[norm]).astype(np.float32)
        halves[norm] = tensors[norm], tensors[norm]
    infos = [TensorInfo(name, values.shape, TYPES["F32"]) for name, values in tensors.items()]
    keys = {
        "general.architecture": string("qwen3moe" if "moe" in model.name else "llama"),
        "general.type": string("adapter"),
        "adapter.type": string("lora"),
        "adapter.lora.alpha": f32(ALPHA),
    } | (metadata or {})
    with GGUFWriter(path, keys, infos) as sink:
        for info in infos:
            sink.write(info, tensors[info.name].reshape(-1).view(np.uint8))
    return halves


@pytest.mark.parametrize("type", QUANTIZED)
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_merged_weights_are_what_they_should_be(models, tmp_path, name, type):
    model, out = models[name, type], tmp_path / "out.gguf"
    one = write_adapter(tmp_path / "1.gguf", model, WEIGHTS[name], norm="blk.0.attn_norm.weight")
    two = write_adapter(tmp_path / "2.gguf", model, WEIGHTS[name][:1], seed=1)
    iqforge.export_lora(
        model, out, [f"{tmp_path}/1.gguf", f"{tmp_path}/2.gguf:-0.5"], outtype="f32"
    )
    before, after = floats(model), floats(out)
    assert before.keys() == after.keys()
    for tensor in before:
        expected = before[tensor].astype(np.float64)
        for halves, scale in ((one, 1.0), (two, -0.5)):
            if tensor.endswith("norm.weight"):
                expected = halves.get(tensor, [expected])[0]
            elif tensor in halves:
                a, b = (x.astype(np.float64) for x in halves[tensor])
                expected = expected + scale * ALPHA / RANK * (b @ a)
        np.testing.assert_allclose(after[tensor], expected, atol=2e-5, err_msg=tensor)
    with open_gguf(model) as old, open_gguf(out) as new:
        for a, b in zip(old.tensors, new.tensors):
            if a.name not in one:  # all others keep their bytes
                assert a == b
                assert (old.read_bytes(a, 0, a.n_bytes) == new.read_bytes(b, 0, b.n_bytes)).all()
            elif len(a.shape) > 1:
                assert b.type is TYPES["F32"]


def test_any_rows(models, tmp_path):
    """Also from the middle of a group of interleaved rows, and across experts."""
    model = models["moe", "IQ4_K_R4"]
    write_adapter(tmp_path / "1.gguf", model, WEIGHTS["moe"])
    with LoraSource(open_gguf(model), [AdapterFile(str(tmp_path / "1.gguf"))], TYPES["F32"]) as s:
        tensor = next(t for t in s.tensors if t.name == "blk.0.ffn_up_exps.weight")
        whole = s.read_rows(tensor, 0, tensor.n_rows)
        per_expert = tensor.shape[1]
        for start, stop in ((0, 1), (3, 9), (per_expert - 3, per_expert + 6), (5, tensor.n_rows)):
            found = s.read_rows(tensor, start, stop)
            np.testing.assert_allclose(
                found.view(np.float32), whole[start:stop].view(np.float32), atol=1e-6
            )


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_model_with_an_adapter_is_the_exported_one(models, tmp_path, name):
    model = models[name, "Q8_0"]
    write_adapter(tmp_path / "1.gguf", model, WEIGHTS[name])
    adapter = f"{tmp_path}/1.gguf:0.7"
    out = iqforge.export_lora(model, tmp_path / "out.gguf", adapter, outtype="f32")
    tokens = list(range(3, 40))
    with iqforge.load_model(model, lora=(adapter,)) as merged, iqforge.load_model(out) as exported:
        found, expected = merged.forward(tokens), exported.forward(tokens)
    with iqforge.load_model(model) as plain:
        assert (found - expected).abs().max() < 1e-4 < (plain.forward(tokens) - found).abs().max()


def test_types_of_exports(models, tmp_path):
    for type, outtype, expected in (
        ("Q8_0", None, "F16"),
        ("BF16", None, "BF16"),
        ("BF16", "f16", "F16"),
    ):
        model = models["llama", type]
        write_adapter(tmp_path / "1.gguf", model, WEIGHTS["llama"][:1])
        out = iqforge.export_lora(model, tmp_path / "o.gguf", tmp_path / "1.gguf", outtype=outtype)
        with open_gguf(out) as file:
            assert file.tensors[0].type.name == type
            [changed] = [t for t in file.tensors if t.name == WEIGHTS["llama"][0]]
            assert changed.type.name == expected


def test_names_and_scales(tmp_path):
    (tmp_path / "a:2.gguf").write_bytes(b"")
    assert parse_adapter(str(tmp_path / "a:2.gguf")) == [AdapterFile(str(tmp_path / "a:2.gguf"))]
    assert parse_adapter("a.gguf") == [AdapterFile("a.gguf")]
    assert parse_adapter("a.gguf:0.5,b:c.gguf,d.gguf:-2") == [
        AdapterFile("a.gguf", 0.5),
        AdapterFile("b:c.gguf"),
        AdapterFile("d.gguf", -2),
    ]
    with pytest.raises(IqforgeError, match="is not a number"):
        parse_adapter("a.gguf:nan")
    options = LoadOptions(lora=("a", "b:2"), lora_scaled=("c:3",))
    assert [one.scale for one in options.adapters()] == [1, 2, 3]


def test_refusals(models, tmp_path):
    model, path = models["llama", "BF16"], tmp_path / "bad.gguf"

    def refused(error: type[IqforgeError], words: str, weights=WEIGHTS["llama"][:1], **options):
        write_adapter(path, model, weights, **options)
        with pytest.raises(error, match=words):
            iqforge.load_model(model, lora=(str(path),))

    refused(ArchitectureError, "adapter for qwen3moe", metadata={
        "general.architecture": string("qwen3moe")
    })  # fmt: skip
    refused(MalformedFileError, "not a LoRA adapter", metadata={"general.type": string("model")})
    refused(
        ShapeError,
        "does not fit",
        change=lambda name, x: x[:, :-4].copy() if name.endswith("lora_a") else x,
    )
    refused(MalformedFileError, "has no tensors", weights=[])
    refused(MalformedFileError, "not finite", metadata={"adapter.lora.alpha": f32(float("nan"))})
    write_adapter(path, model, WEIGHTS["llama"][:1], change=lambda name, x: x * np.float32("nan"))
    with pytest.raises(NonFiniteError, match="bad.gguf, tensor 'blk.0.attn_q.weight'"):
        iqforge.export_lora(model, tmp_path / "merged.gguf", path)
    assert not (tmp_path / "merged.gguf").exists()
    with open_gguf(path) as file:
        integers = [t.with_type(TYPES["I32"]) for t in file.tensors]
        with GGUFWriter(tmp_path / "i32.gguf", dict(file.metadata), integers) as sink:
            for t in integers:
                sink.write(t, np.zeros(t.n_bytes, np.uint8))
    with pytest.raises(UnsupportedTypeError, match="i32.gguf, tensor .* is I32"):
        iqforge.load_model(model, lora=(str(tmp_path / "i32.gguf"),))
    with pytest.raises(MalformedFileError, match="not a LoRA adapter"):
        iqforge.load_model(model, lora=(str(model),))
    write_adapter(path, models["moe", "BF16"], WEIGHTS["moe"][1:], metadata={
        "general.architecture": string("llama")
    })  # fmt: skip
    with pytest.raises(MalformedFileError, match="belongs to no tensor"):
        iqforge.load_model(model, lora=(str(path),))
    with pytest.raises(IqforgeError, match="same file"):
        write_adapter(path, model, WEIGHTS["llama"][:1])
        iqforge.export_lora(model, model, path)


def test_adapters_are_not_overwritten(models, tmp_path, capsys):
    model, adapter = str(models["llama", "BF16"]), tmp_path / "lora.gguf"
    write_adapter(adapter, Path(model), WEIGHTS["llama"][:1])
    text = tmp_path / "text.txt"
    text.write_text("The function returns a list of numbers.\n" * 60)
    link, before = tmp_path / "link.gguf", adapter.read_bytes()
    link.symlink_to(adapter)
    out, cpu = str(adapter), ["--device", "cpu", "--lora", f"{adapter}:0.5"]
    texts = ["-f", str(text), "-c", "32", "--chunks", "1"]
    for words in (
        ["export-lora", "-m", model, "--lora", f"{link}:0.5", "-o", out],
        ["export-lora", "-m", model, "--lora", out, "-o", str(link)],
        ["perplexity", "-m", model, *texts, "--kl-divergence-base", out, *cpu],
        ["imatrix", "-m", model, *texts, "-o", out, *cpu],
        ["hessian", "-m", model, *texts, "-o", out, *cpu],
        ["sensitivity", "-m", model, *texts, "-o", out, *cpu],
        ["generate", "-m", model, "-p", "The", "--prompt-cache", out, *cpu],
        ["compare", model, model, "-f", str(text), "--html", out, *cpu],
    ):
        assert main(words) == 1, words
        assert "the output is the same file as the input" in capsys.readouterr().err, words
        assert adapter.read_bytes() == before


def test_commands(models, tmp_path, capsys):
    model = str(models["llama", "BF16"])
    write_adapter(tmp_path / "1.gguf", Path(model), WEIGHTS["llama"])
    adapter, out = f"{tmp_path}/1.gguf:0.5", str(tmp_path / "out.gguf")
    assert main(["export-lora", "-m", model, "--lora", adapter, "-o", out, "--outtype", "f32"]) == 0
    assert main(["export-lora", "-m", model, "-o", out]) == 1
    assert "an adapter is needed" in capsys.readouterr().err
    cpu = ["--device", "cpu"]
    (tmp_path / "text.txt").write_text("The function returns a list of numbers.\n" * 60)
    text = ["-f", str(tmp_path / "text.txt"), "-c", "32", "--chunks", "2"]

    def perplexity(*words: str) -> float:
        assert main(["perplexity", *words, *text, *cpu]) == 0
        return float(re.findall("PPL = ([0-9.]+)", capsys.readouterr().out)[0])

    expected = perplexity("-m", out)
    assert perplexity("-m", model, "--lora", adapter) == pytest.approx(expected, rel=1e-5)
    assert perplexity("-m", model) != pytest.approx(expected, rel=1e-2)
    scaled = ["--lora-scaled", *adapter.rsplit(":", 1)]
    assert perplexity("-m", model, *scaled) == pytest.approx(expected, rel=1e-5)
    halves = [*scaled[:2], "0.2", *scaled[:2], "0.3"]
    assert perplexity("-m", model, *halves) == pytest.approx(expected, rel=1e-5)
    again = ["-o", str(tmp_path / "again.gguf"), "--outtype", "f32"]
    assert main(["export-lora", "-m", model, *scaled, *again]) == 0
    assert (tmp_path / "again.gguf").read_bytes() == Path(out).read_bytes()
    for words in (
        ["generate", "-p", "The", "-n", "2", *cpu],
        ["chat", "-p", "The", "-n", "2", "-st", "--chat-template", "chatml", *cpu],
        ["imatrix", *text, "-o", str(tmp_path / "i.dat"), *cpu],
        ["bench", "-p", "8", "-n", "2", "-r", "1", *cpu],
    ):
        assert main([words[0], "-m", model, *words[1:], *scaled]) == 0
        missing = ["--lora", str(tmp_path / "none.gguf")]
        capsys.readouterr()
        assert main([words[0], "-m", model, *words[1:], *missing]) == 1  # it is read everywhere
        printed = capsys.readouterr()
        assert "none.gguf" in printed.err and not printed.out  # not even the head of a table


def test_the_reference_logits():
    """Those of transformers and PEFT, with the adapter and without it."""
    expected = np.load(shared("golden/convert/lora_llama/logits.npz"))
    model = shared("golden/convert/llama/hf")
    adapter = str(shared("golden/convert/lora_llama/expected-f32.gguf"))
    for lora, name in (((adapter,), "logits"), ((f"{adapter}:0",), "base_logits")):
        with iqforge.load_model(model, lora=lora) as opened:
            found = opened.forward(expected["input_ids"]).numpy()
        difference = np.abs(found - expected[name]).max() / np.abs(expected[name]).max()
        assert difference < 1e-3, name
