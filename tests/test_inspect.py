"""`iqforge inspect` prints what is in the file, and no file can control the terminal."""

from __future__ import annotations

import json

import iqforge
import pytest
from iqforge.cli import main
from iqforge.formats.gguf.reader import open_gguf

from .ggufbuild import (
    ARRAY,
    F32,
    F64,
    STRING,
    U8,
    U32,
    array,
    array_pair,
    entry,
    gguf,
    pair,
    small,
    text,
)
from .shared import shared

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\u202edlrow\x9b1m"


def printed(capsys, *words) -> str:
    assert main(["inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_sizes_types_and_places(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(
        gguf(
            [pair("general.architecture", STRING, "llama"), pair("x.y", U32, 7)],
            [
                entry("a", [256, 2], 12, 0),
                entry("b", [8, 4], 0, 288),
                entry("c", [256, 4, 3], 12, 416),
            ],
            bytes(416 + 12 * 144),
        )
    )
    summary = iqforge.inspect_model(tmp_path / "m.gguf")
    assert [(t.info.name, t.info.shape, t.info.n_bytes) for t in summary.tensors] == [
        ("a", (2, 256), 288),
        ("b", (4, 8), 128),
        ("c", (3, 4, 256), 1728),
    ]
    assert [
        (t.name, t.n_tensors, t.n_elements, t.n_bytes, t.bits_per_weight) for t in summary.types
    ] == [("Q4_K", 2, 3584, 2016, 4.5), ("F32", 1, 32, 128, 32.0)]
    assert summary.total.n_bytes == 2144 and summary.total.bits_per_weight == pytest.approx(
        8 * 2144 / 3616
    )
    with open_gguf(tmp_path / "m.gguf") as file:
        assert [t.offset for t in summary.tensors] == [file.location(name)[1] for name in "abc"]
    out = printed(capsys, tmp_path / "m.gguf", "--data-offset")
    assert (
        "x.y                   UINT32  7" in out
        and "256 x 4 x 3" in out
        and "4.743 bits per weight" in out
    )
    assert f"at {summary.tensors[1].offset}" in out
    assert "256 x 4 x 3" not in printed(capsys, tmp_path / "m.gguf", "--no-tensors")
    found = json.loads(printed(capsys, tmp_path / "m.gguf", "--json"))
    assert found["metadata"]["x.y"] == {"type": "UINT32", "value": 7} and found["n_bytes"] == 2144
    assert (
        found["tensors"][2]["shape"] == [3, 4, 256]
        and found["tensors"][2]["bits_per_weight"] == 4.5
    )


def test_row_headers_count_as_bits(tmp_path):
    # IQ4_KS: 4 bytes per row.
    (tmp_path / "m.gguf").write_bytes(gguf([], [entry("a", [256, 4], 144, 0)], bytes(4 * 140)))
    assert iqforge.inspect_model(tmp_path / "m.gguf").tensors[0].bits_per_weight == 8 * 140 / 256


def test_nothing_reaches_the_terminal_raw(tmp_path, capsys):
    pairs = [
        pair("evil", STRING, ESCAPES),
        array_pair("evils", STRING, [ESCAPES] * 3),
        pair("not.utf8", STRING, b"\xff\x1b[31m"),
    ]
    (tmp_path / "m.gguf").write_bytes(gguf(pairs, [entry("t", [8], 0, 0)], bytes(32)))
    for words in ((), ("--full",), ("--json",), ("--json", "--full")):
        out = printed(capsys, tmp_path / "m.gguf", *words)
        assert all(c.isprintable() or c == "\n" for c in out)
        assert "owned" in out
    found = json.loads(out)
    assert (
        found["metadata"]["evil"]["value"] == ESCAPES
        and found["metadata"]["evils"]["value"] == [ESCAPES] * 3
    )


def test_long_values_are_shortened_unless_full(tmp_path, capsys):
    pairs = [
        array_pair("tokens", STRING, [f"token{i}" for i in range(5000)]),
        pair("template", STRING, "y" * 5000),
        array_pair("empty", U8, []),
    ]
    (tmp_path / "m.gguf").write_bytes(gguf(pairs))
    short, full = (
        printed(capsys, tmp_path / "m.gguf"),
        printed(capsys, tmp_path / "m.gguf", "--full"),
    )
    assert (
        len(short) < 2000
        and "STRING[5000]" in short
        and "token4999" not in short
        and "(5000 characters)" in short
    )
    assert "token4999" in full and "y" * 5000 in full
    found = json.loads(printed(capsys, tmp_path / "m.gguf", "--json"))["metadata"]
    assert (
        len(found["tokens"]["value"]) == 8
        and found["tokens"]["length"] == 5000
        and found["template"]["length"] == 5000
    )
    found = json.loads(printed(capsys, tmp_path / "m.gguf", "--json", "--full"))["metadata"]
    assert (
        len(found["tokens"]["value"]) == len(found["template"]["value"]) == 5000
        and "length" not in found["tokens"]
    )


def test_numbers_that_json_lacks_and_nested_arrays(tmp_path, capsys):
    nested = (
        text("nested")
        + ARRAY.to_bytes(4, "little")
        + array(ARRAY, array(U32, [1, 2]) + array(U32, [3]), 2)
    )
    pairs = [
        pair("nan", F32, float("nan")),
        pair("tenth", F32, 0.1),
        array_pair("inf", F64, [float("inf"), 1.5]),
        nested,
    ]
    (tmp_path / "m.gguf").write_bytes(gguf(pairs))
    out = printed(capsys, tmp_path / "m.gguf")
    assert "[[1, 2], [3]]" in out and "[inf, 1.5]" in out
    assert ["tenth", "FLOAT32", "0.1"] in [line.split() for line in out.splitlines()]
    found = json.loads(printed(capsys, tmp_path / "m.gguf", "--json"))["metadata"]
    assert found["nan"]["value"] == "nan" and found["inf"]["value"] == ["inf", 1.5]
    assert [inner["value"] for inner in found["nested"]["value"]] == [[1, 2], [3]]


def test_split_model_and_no_model(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(small(5))
    first, *others = iqforge.split_model(tmp_path / "m.gguf", tmp_path / "s", max_tensors=2)
    summary = iqforge.inspect_model(first)
    assert len(summary.files) == 3 and summary.total.n_tensors == 5
    assert summary.file_bytes == sum(path.stat().st_size for path in (first, *others))
    assert "2 more shards" in printed(capsys, first) and "of shard 3" in printed(
        capsys, first, "--data-offset"
    )
    assert main(["inspect", str(others[0])]) == 1 and main(["inspect", str(tmp_path / "none")]) == 1
    (tmp_path / "bad.gguf").write_bytes(small(2)[:-10])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "bad.gguf")]) == 1
    assert "tensor 't1'" in capsys.readouterr().err


def test_agrees_with_the_gguf_package():
    gguf_package = pytest.importorskip("gguf")
    path = shared("golden/tools/gguf/tiny-llama-f16.gguf")
    summary = iqforge.inspect_model(path)
    assert [(t.info.name, t.info.n_bytes, t.offset) for t in summary.tensors] == [
        (t.name, t.n_bytes, t.data_offset) for t in gguf_package.GGUFReader(path).tensors
    ]
