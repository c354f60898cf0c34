"""Merging gate and up in finished files equals the converter's merge and is undone byte for byte,
for every type. Other cases are refused.
"""

from __future__ import annotations

import os

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import (
    MalformedFileError,
    OutputError,
    ShapeError,
    UnsupportedTypeError,
    UsageError,
)
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import TYPES

from .ggufbuild import STRING, U32, entry, gguf, pair
from .shared import shared
from .tiny_checkpoint import make_tiny_qwen3moe

EXPERTS, FF, EMBD = 3, 16, 256


def contents(path) -> dict[str, tuple]:
    with open_gguf(path) as file:
        return {
            t.name: (t.shape, t.type.name, bytes(file.read_bytes(t, 0, t.n_bytes)))
            for t in file.tensors
        }


def build(path, tensors: list[tuple[str, list[int], str]], pairs=()):
    """Write a file of random bytes; shapes are in file order, row length first."""
    random, entries, data = np.random.default_rng(3), [], b""
    for name, dims, kind in tensors:
        n_bytes = TYPES[kind].tensor_bytes(tuple(reversed(dims)))
        entries.append(entry(name, dims, TYPES[kind].id, len(data)))
        data += random.integers(0, 256, n_bytes, np.uint8).tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(
        gguf(
            [
                pair("general.architecture", STRING, "qwen3moe"),
                pair("general.file_type", U32, 15),
                *pairs,
            ],
            entries,
            data,
        )
    )
    return path


def experts(kind: str, order=("gate", "up"), ff: int = FF) -> list[tuple[str, list[int], str]]:
    return [
        ("token_embd.weight", [256, 4], "F32"),
        *(
            (f"blk.{layer}.ffn_{half}_exps.weight", [EMBD, ff, EXPERTS], kind)
            for layer in range(2)
            for half in order
        ),
        ("output_norm.weight", [256], "F32"),
    ]


@pytest.mark.parametrize("kind", [name for name, kind in TYPES.items() if not kind.tail_bytes])
def test_bytes_of_every_type(tmp_path, kind):
    source = build(tmp_path / "in.gguf", experts(kind))
    plan = iqforge.merge_gate_up(source, tmp_path / "merged.gguf")
    assert [planned.changed for planned in plan] == [False, True, True, False]
    before, after = contents(source), contents(tmp_path / "merged.gguf")
    for layer in range(2):
        shape, type, data = after.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        assert shape == (EXPERTS, 2 * FF, EMBD) and type == kind
        halves = [
            np.frombuffer(before.pop(f"blk.{layer}.ffn_{half}_exps.weight")[2], np.uint8).reshape(
                EXPERTS, -1
            )
            for half in ("gate", "up")
        ]
        assert np.array_equal(
            np.frombuffer(data, np.uint8).reshape(EXPERTS, -1), np.concatenate(halves, 1)
        )
    assert before == after
    iqforge.merge_gate_up(tmp_path / "merged.gguf", tmp_path / "undone.gguf", undo=True)
    assert (tmp_path / "undone.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("kind", ["BF16", "IQ4_K", "IQ4_K_R4", "Q8_0"])
def test_same_as_the_converter_merges(tmp_path, kind):
    """An expert of a merged tensor decodes to its gate rows, then its up rows, also where rows are
    interleaved.
    """
    folder = make_tiny_qwen3moe(tmp_path / "hf", n_layers=1)
    made = {}
    for merged in (False, True):
        path = iqforge.convert_model(folder, tmp_path / f"{merged}.gguf", merge_gate_up=merged)
        if kind != "BF16":
            iqforge.quantize_model(
                path, tmp_path / f"{merged}-q.gguf", kind, pure=True, provenance=False
            )
            path = tmp_path / f"{merged}-q.gguf"
        made[merged] = path
    iqforge.merge_gate_up(made[False], tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == made[True].read_bytes()
    iqforge.merge_gate_up(made[True], tmp_path / "u.gguf", undo=True)
    assert (tmp_path / "u.gguf").read_bytes() == made[False].read_bytes()


def test_equal_to_the_reference(tmp_path):
    apart, merged = (
        shared(f"golden/convert/qwen3_moe/expected-{name}f32.gguf") for name in ("", "fused-")
    )
    iqforge.merge_gate_up(apart, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == merged.read_bytes()
    iqforge.merge_gate_up(merged, tmp_path / "u.gguf", undo=True)
    assert (tmp_path / "u.gguf").read_bytes() == apart.read_bytes()


def test_up_before_gate_and_other_tensors_between(tmp_path):
    tensors = experts("Q8_0", ("up", "down", "gate"))
    source = build(tmp_path / "in.gguf", tensors)
    iqforge.merge_gate_up(source, tmp_path / "m.gguf")
    assert list(contents(tmp_path / "m.gguf"))[1:3] == [
        "blk.0.ffn_down_exps.weight",
        "blk.0.ffn_gate_up_exps.weight",
    ]
    iqforge.merge_gate_up(tmp_path / "m.gguf", tmp_path / "u.gguf", undo=True)
    assert contents(tmp_path / "u.gguf") == contents(source)


def test_biases_and_keys(tmp_path):
    tensors = [
        ("blk.0.ffn_gate_exps.weight", [EMBD, FF, EXPERTS], "MXFP4"),
        ("blk.0.ffn_up_exps.weight", [EMBD, FF, EXPERTS], "MXFP4"),
        ("blk.0.ffn_gate_exps.bias", [FF, EXPERTS], "F32"),
        ("blk.0.ffn_up_exps.bias", [FF, EXPERTS], "F32"),
    ]
    source = build(tmp_path / "in.gguf", tensors, [pair("x.y", STRING, "z")])
    iqforge.merge_gate_up(source, tmp_path / "m.gguf")
    before, after = contents(source), contents(tmp_path / "m.gguf")
    shape, _, data = after["blk.0.ffn_gate_up_exps.bias"]
    gate, up = (
        np.frombuffer(before[f"blk.0.ffn_{half}_exps.bias"][2], np.uint8).reshape(EXPERTS, -1)
        for half in ("gate", "up")
    )
    assert shape == (EXPERTS, 2 * FF) and data == np.concatenate([gate, up], 1).tobytes()
    with open_gguf(source) as a, open_gguf(tmp_path / "m.gguf") as b:
        assert a.metadata == b.metadata and list(a.metadata) == list(b.metadata)


def test_shards_in_one_file_out(tmp_path):
    source = build(tmp_path / "in.gguf", experts("IQ4_XS"))
    # The halves are in two shards.
    first = iqforge.split_model(source, tmp_path / "s", max_tensors=2)[0]
    iqforge.merge_gate_up(first, tmp_path / "m.gguf")
    iqforge.merge_gate_up(source, tmp_path / "n.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()


def test_refusals(tmp_path):
    gate, up, both = (f"blk.0.ffn_{half}_exps.weight" for half in ("gate", "up", "gate_up"))
    full, odd = [EMBD, FF, EXPERTS], [EMBD, FF + 4, EXPERTS]
    cases = [
        ([(gate, full, "Q4_K"), (up, full, "Q5_K")], False, UnsupportedTypeError, "Q4_K.*Q5_K"),
        ([(gate, full, "Q4_K"), (up, odd, "Q4_K")], False, ShapeError, r"16, 256.*20, 256"),
        ([(gate, full, "Q4_K")], False, MalformedFileError, "other half"),
        (
            [(gate, full, "Q4_K"), (up, full, "Q4_K"), (both, full, "Q4_K")],
            False,
            MalformedFileError,
            "together with its unmerged halves",
        ),
        (
            [(both, full, "Q4_K"), (up, full, "Q4_K")],
            True,
            MalformedFileError,
            "already exists next to the merged",
        ),
        ([(gate, full, "I2_S"), (up, full, "I2_S")], False, UnsupportedTypeError, "one scale"),
        ([(gate, [EMBD, FF], "F32"), (up, [EMBD, FF], "F32")], False, ShapeError, "3 dimensions"),
        ([(both, [EMBD, 4, EXPERTS], "IQ4_K_R4")], True, ShapeError, "4 rows.*groups of 4"),
        ([(both, [EMBD, 5, EXPERTS], "F32")], True, ShapeError, "5 rows"),
        (
            [(name.replace("weight", "scale"), [EXPERTS], "F32") for name in (gate, up)],
            False,
            UnsupportedTypeError,
            "'scale'",
        ),
        ([("x.weight", full, "F32")], False, UsageError, "no experts"),
        ([(gate, full, "F32"), (up, full, "F32")], True, UsageError, "no merged"),
    ]
    for tensors, undo, error, words in cases:
        build(tmp_path / "in.gguf", tensors)
        with pytest.raises(error, match=words):
            iqforge.merge_gate_up(tmp_path / "in.gguf", tmp_path / "out.gguf", undo=undo)
    build(tmp_path / "in.gguf", experts("F32"))
    with pytest.raises(OutputError, match="same file"):
        iqforge.merge_gate_up(tmp_path / "in.gguf", tmp_path / "in.gguf")
    with pytest.raises(UsageError, match="output"):
        iqforge.merge_gate_up(tmp_path / "in.gguf", None)

    def fail(n_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iqforge.merge_gate_up(tmp_path / "in.gguf", tmp_path / "out.gguf", progress=fail)
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_command(tmp_path, capsys):
    build(tmp_path / "in.gguf", experts("Q4_K"))
    assert main(["merge-gate-up", "--dry-run", str(tmp_path / "in.gguf")]) == 0
    assert "blk.1.ffn_gate_up_exps.weight: 256 x 32 x 3, Q4_K" in capsys.readouterr().out
    assert main(["merge-gate-up", str(tmp_path / "in.gguf")]) == 1 and os.listdir(tmp_path) == [
        "in.gguf"
    ]
    assert main(["merge-gate-up", str(tmp_path / "in.gguf"), str(tmp_path / "m.gguf")]) == 0
    assert (
        main(["merge-gate-up", "--undo", str(tmp_path / "m.gguf"), str(tmp_path / "u.gguf")]) == 0
    )
    assert "4 of 6 tensors split" in capsys.readouterr().out
    assert (tmp_path / "u.gguf").read_bytes() == (tmp_path / "in.gguf").read_bytes()
