"""An importance matrix of another model is refused wherever one is used, and missing entries alone
are not taken for another model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import ImatrixError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES
from iqforge.imatrix.belongs import check_belongs, check_same_model, warn_missing
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.quantize.plan.changes import Changes

from .tiny_checkpoint import make_tiny_llama

WIDTH, HIDDEN, EXPERTS = 32, 64, 4
DENSE = {
    "attn_q.weight": (WIDTH, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
}
MOE = {
    "attn_q.weight": (WIDTH, WIDTH),
    "ffn_gate_inp.weight": (EXPERTS, WIDTH),
    "ffn_gate_exps.weight": (EXPERTS, HIDDEN, WIDTH),
    "ffn_up_exps.weight": (EXPERTS, HIDDEN, WIDTH),
    "ffn_down_exps.weight": (EXPERTS, WIDTH, HIDDEN),
}
MTP = {"nextn.eh_proj.weight": (WIDTH, 2 * WIDTH), **DENSE}


def tensors(*blocks: dict[str, tuple[int, ...]], head: bool = True) -> list[TensorInfo]:
    shapes = {"token_embd.weight": (100, WIDTH), "output.weight": (100, WIDTH)} if head else {}
    for number, block in enumerate(blocks):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
        shapes[f"blk.{number}.attn_norm.weight"] = (WIDTH,)
    return [TensorInfo(name, shape, TYPES["F32"]) for name, shape in shapes.items()]


def imatrix(model: list[TensorInfo], without: str = "?") -> Imatrix:
    """Return an importance matrix like that of a collection without the output matrix."""
    return Imatrix(
        {
            t.name: Entry(np.ones((t.n_matrices, t.n_cols)), np.full(t.n_matrices, 8))
            for t in model
            if t.name.startswith("blk.") and len(t.shape) > 1 and without not in t.name
        },
        1,
        8,
        path="x.gguf",
    )


def changed(block: dict, **shapes: tuple[int, ...]) -> dict:
    return block | {f"{name}.weight": shape for name, shape in shapes.items()}


FEWER_EXPERTS = {
    name: (shape if len(shape) == 2 else (2, *shape[1:])) for name, shape in MOE.items()
}


@pytest.mark.parametrize(
    "of, model, message",
    [
        (
            [DENSE] * 3,
            [DENSE] * 2,
            "entries for 3 layers, the model has 2 layers; the model has no",
        ),
        ([DENSE] * 2, [DENSE] * 3, "entries for 2 layers, the model has 3 layers"),
        (
            [changed(DENSE, ffn_down=(WIDTH, 48))] * 2,
            [DENSE] * 2,
            r"tensor 'blk.0.ffn_down.weight': .* has 48 values in 1.*\(2 entries do not fit",
        ),
        ([FEWER_EXPERTS], [MOE], r"tensor 'blk.0.ffn_gate_exps.weight': .* in each of 4"),
        (
            [DENSE, MOE],
            [MOE, MOE],
            r"no tensor for 2 of 8 entries \(blk.0.ffn_up.weight, blk.0.ffn",
        ),
        (
            [changed(DENSE, attn_qkv=(96, WIDTH))],
            [DENSE],
            r"1 of 4 entries \(blk.0.attn_qkv.weight\)",
        ),
    ],
)
def test_another_model_is_refused(of, model, message, caplog):
    other, model = imatrix(tensors(*of)), tensors(*model)
    with pytest.raises(ImatrixError, match=f"x.gguf: .* another model: .*{message}.*--force"):
        check_belongs(other, model)
    assert not caplog.records
    found = check_belongs(other, model, force=True)
    assert "seems to belong to another model" in caplog.text
    for tensor in model:
        found.entry(tensor.name, tensor.shape)  # the remaining entries can be used


SPLIT_GATE_UP = tensors(MOE)
MERGED = {name: shape for name, shape in MOE.items() if "gate_e" not in name and "up_e" not in name}
MERGED |= {"ffn_gate_up_exps.weight": (EXPERTS, 2 * HIDDEN, WIDTH)}
NOT_ANOTHER_MODEL = {
    "the output matrix collected, and tied in the model": (
        Imatrix(
            {"output.weight": Entry(np.ones((1, WIDTH)), np.array([8]))}
            | imatrix(tensors(DENSE)).entries,
            1,
            8,
        ),
        tensors(DENSE, head=False),
    ),
    "an expert tensor left out": (imatrix(tensors(MOE, MOE), "1.ffn_down"), tensors(MOE, MOE)),
    "merged gate and up, split in the model": (imatrix(tensors(MERGED)), SPLIT_GATE_UP),
    "split gate and up, merged in the model": (imatrix(SPLIT_GATE_UP), tensors(MERGED)),
    "a model with layers for further tokens": (imatrix(tensors(DENSE)), tensors(DENSE, MTP)),
    "an importance matrix with such layers": (imatrix(tensors(DENSE, MTP)), tensors(DENSE)),
    "a model of such layers alone": (
        imatrix(tensors(DENSE, DENSE)),
        [t for t in tensors(DENSE, DENSE, MTP) if "blk.0" not in t.name and "blk.1" not in t.name],
    ),
    "one matrix for all heads, or one for each": (
        Imatrix({"blk.0.attn_kv_b.weight": Entry(np.ones((1, WIDTH)), np.array([8]))}, 1, 8),
        tensors({"attn_k_b.weight": (2, 16, WIDTH), "attn_v_b.weight": (2, 16, WIDTH)}),
    ),
    "the embedding as output matrix": (
        Imatrix({"token_embd.weight": Entry(np.ones((1, 7)), np.array([8]))}, 1, 8),
        tensors(DENSE),
    ),
    "an encoder for images": (
        Imatrix({"v.blk.0.attn_q.weight": Entry(np.ones((1, 7)), np.array([8]))}, 1, 8),
        tensors(DENSE),
    ),
}


@pytest.mark.parametrize("name", NOT_ANOTHER_MODEL)
def test_differences_that_an_importance_matrix_may_have(name, caplog):
    given, model = NOT_ANOTHER_MODEL[name]
    assert check_belongs(given, model) is given
    assert not caplog.records


def test_missing_entries_are_reported(caplog):
    model = tensors(DENSE, DENSE, MTP)
    some = [t for t in model if len(t.shape) > 1]
    warn_missing(imatrix(tensors(DENSE, DENSE)), some)
    assert not caplog.records
    warn_missing(imatrix(tensors(DENSE, DENSE), "1.ffn_up"), some)
    assert "no entry for 1 of 6 tensors to be quantized (blk.1.ffn_up.weight)" in caplog.text
    assert "another model" not in caplog.text
    warn_missing(imatrix(tensors(DENSE)), [t for t in tensors(*[DENSE] * 4) if len(t.shape) > 1])
    assert "no entry for 9 of 12" in caplog.text and "another model?" in caplog.text


def test_files_of_two_models_are_not_merged(tmp_path, caplog, capsys):
    two, three = imatrix(tensors(DENSE, DENSE)), imatrix(tensors(DENSE, DENSE, DENSE))
    with pytest.raises(ImatrixError, match="entries for 3 layers, the other for 2 layers.*--force"):
        iqforge.merge_imatrices([two, three])
    with pytest.raises(
        ImatrixError, match="only it has blk.1.ffn_up.*only the other has blk.1.ffn_"
    ):
        check_same_model([imatrix(tensors(MOE, MOE)), imatrix(tensors(MOE, DENSE))])
    assert not caplog.records
    check_same_model([imatrix(tensors(MOE, MOE)), imatrix(tensors(MOE, MOE), "1.ffn_down")])
    assert "no entry for 1 tensors of x.gguf (blk.1.ffn_down_exps.weight)" in caplog.text
    paths = [str(tmp_path / name) for name in ("two.gguf", "three.gguf")]
    for path, part in zip(paths, (two, three)):
        save_imatrix(part, path)
    words = [
        "imatrix",
        "--in-file",
        paths[0],
        "--in-file",
        paths[1],
        "-o",
        str(tmp_path / "o.gguf"),
    ]
    assert main(words) == 1
    assert f"another model than {paths[0]}" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return iqforge.convert_model(
        make_tiny_llama(folder / "hf", n_layers=2), folder / "m.gguf", "f16"
    )


def collected(model: Path, without: str = "?") -> Imatrix:
    with open_gguf(model) as source:
        return imatrix(list(source.tensors), without)


def test_quantize_refuses_and_force_uses_what_fits(model, tmp_path, capsys, caplog):
    """If the sizes match, the number of layers shows the other model."""
    given = collected(model)
    assert "blk.0.attn_q.weight" in given.entries
    longer = replace(
        given,
        entries=given.entries
        | {name.replace("blk.1", "blk.2"): entry for name, entry in given.entries.items()},
    )
    save_imatrix(longer, path := str(tmp_path / "longer.gguf"))
    words = ["quantize", "--imatrix", path, str(model), str(tmp_path / "q.gguf"), "Q4_0", "1"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "longer.gguf" in told and "3 layers, the model has 2 layers" in told
    assert not (tmp_path / "q.gguf").exists()
    assert main([*words[:1], "--force", *words[1:]]) == 0
    with pytest.raises(ImatrixError, match="another model"):
        iqforge.recipe_for_target(model, longer, bpw=5)
    # A layer that is left out takes its entries with it.
    caplog.clear()
    pruned = Changes(prune_layers=[0])
    iqforge.quantize_model(model, tmp_path / "p.gguf", "Q4_0", given, changes=pruned, threads=1)
    assert not caplog.records


def test_missing_entries_are_reported_when_quantizing(model, tmp_path, caplog):
    given = collected(model, "ffn_up")
    iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", given, threads=1)
    assert "no entry for 2 of 14 tensors to be quantized (blk.0.ffn_up.weight" in caplog.text
    caplog.clear()
    excluded = Changes(exclude_weights=["ffn_up", "blk.1"])
    iqforge.quantize_model(model, tmp_path / "q2.gguf", "Q4_0", given, changes=excluded, threads=1)
    assert not caplog.records


def test_convert_refuses(model, tmp_path, capsys):
    given = collected(model)
    del given.entries["blk.1.attn_q.weight"]
    shorter = {name: e for name, e in given.entries.items() if name.startswith("blk.0")}
    save_imatrix(replace(given, entries=shorter), path := str(tmp_path / "short.gguf"))
    words = ["convert", str(model.parent / "hf"), "--outfile", str(tmp_path / "c.gguf")]
    words += ["--outtype", "q4_0", "--imatrix", path]
    for dry in (["--dry-run"], []):
        assert main([*words, *dry]) == 1
        assert "entries for 1 layer, the model has 2 layers" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert main([*words, "--force", "--dry-run"]) == 0
    assert "entries for 1 layer, the model has 2 layers; the entries" in capsys.readouterr().err


def test_measuring_refuses_unless_forced(model, tmp_path, capsys):
    given = collected(model)
    shorter = {name: e for name, e in given.entries.items() if name.startswith("blk.0")}
    save_imatrix(replace(given, entries=shorter), path := str(tmp_path / "short.gguf"))
    iqforge.quantize_model(model, quantized := tmp_path / "q.gguf", "Q4_0", threads=1)
    (text := tmp_path / "text.txt").write_text("a bad cab " * 200)
    probe = ["-c", "16", "--chunks", "2", "--layers", "2", "--type", "Q8_0"]
    for words in (
        ["sensitivity", "-m", str(model), "-f", str(text), *probe, "-o", str(tmp_path / "s.json")],
        ["quantize-stats", str(model), "--type", "Q4_0", "--rows", "2"],
        ["validate", str(quantized), "--against", str(model)],
    ):
        assert main([*words, "--imatrix", path]) == 1
        assert "entries for 1 layer, the model has 2 layers" in capsys.readouterr().err
        assert main([*words, "--imatrix", path, "--force"]) == 0
        assert "the entries that fit are used anyway" in capsys.readouterr().err
