"""Quantizing shards into shards, only missing ones, and resuming; and experts merged or split on
the way.
"""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import UnsupportedTypeError, UsageError
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import SingleFile, open_gguf
from iqforge.formats.gguf.sharded_writer import ShardedWriter
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string, u32
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.run import resume

from .broken_runs import BreakAfter
from .tiny_checkpoint import make_tiny_qwen3moe

KEYS = {"general.architecture": string("llama"), "general.file_type": u32(0)}
GROUPS = (3, 1, 4)  # tensors of each shard


def tensors_of(count: int, kind: str = "F32") -> list[TensorInfo]:
    return [TensorInfo(f"blk.{i}.ffn_up.weight", (16, 256), ggml_type(kind)) for i in range(count)]


def fill(sink, tensors) -> None:
    generator = np.random.default_rng(2)
    for tensor in tensors:
        sink.write(
            tensor,
            encode_float(
                tensor.type,
                generator.standard_normal((tensor.n_rows, tensor.n_cols)).astype(np.float32),
            ),
        )


@pytest.fixture
def split(tmp_path) -> Path:
    tensors = tensors_of(sum(GROUPS))
    starts = np.cumsum([0, *GROUPS])
    with ShardedWriter(
        tmp_path / "in", KEYS, tensors, [tensors[a:b] for a, b in zip(starts, starts[1:])]
    ) as sink:
        fill(sink, tensors)
    return tmp_path / "in-00001-of-00003.gguf"


@pytest.fixture
def whole(tmp_path) -> Path:
    tensors = tensors_of(sum(GROUPS))
    with GGUFWriter(tmp_path / "in.gguf", KEYS, tensors) as sink:
        fill(sink, tensors)
    return tmp_path / "in.gguf"


def shards(tmp_path: Path, count: int = 3) -> list[Path]:
    return [tmp_path / f"q-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]


def contents(path: Path) -> dict[str, bytes]:
    with open_gguf(path) as file:
        return {
            tensor.name: bytes(file.read_bytes(tensor, 0, tensor.n_bytes))
            for tensor in file.tensors
        }


def test_keep_split(split, whole, tmp_path, capsys):
    assert (
        main(["quantize", "--pure", "--keep-split", str(split), str(tmp_path / "q.gguf"), "q4_0"])
        == 0
    )
    said = capsys.readouterr().out
    assert said.count(f"{tmp_path / 'q-00001-of-00003.gguf'} and 2 more\n") == 2  # size, time
    assert "q.gguf" not in said
    for number, (path, count) in enumerate(zip(shards(tmp_path), GROUPS)):
        file = SingleFile(str(path))
        keys = {key: value.data for key, value in file.header.metadata.items()}
        assert len(file.header.tensors) == count
        assert list(keys)[-3:] == ["split.no", "split.count", "split.tensors.count"]
        assert (keys["split.no"], keys["split.count"], keys["split.tensors.count"]) == (
            number,
            3,
            8,
        )
        assert ("general.architecture" in keys) == (number == 0)
        file.close()
    report = iqforge.quantize_model(whole, tmp_path / "one.gguf", "Q4_0", pure=True)
    assert (
        contents(shards(tmp_path)[0]) == contents(tmp_path / "one.gguf")
        and len(report.tensors) == 8
    )
    iqforge.quantize_model(split, tmp_path / "joined.gguf", "Q4_0", pure=True)
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()
    assert (
        main(["quantize", "--pure", "--keep-split", str(whole), str(tmp_path / "w.gguf"), "q4_0"])
        == 0
    )
    assert f"written to {tmp_path / 'w-00001-of-00001.gguf'}\n" in capsys.readouterr().out
    assert (tmp_path / "w-00001-of-00001.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()


def test_partial_requant(split, tmp_path, capsys):
    command = [
        "quantize",
        "--pure",
        "--keep-split",
        "--partial-requant",
        "--validate",
        str(split),
        str(tmp_path / "q.gguf"),
        "q4_0",
    ]
    assert main(command) == 0
    paths = shards(tmp_path)
    before = [path.read_bytes() for path in paths]
    for missing in ([1], [0, 2], []):
        for index in missing:
            paths[index].unlink()
        assert main(command) == 0
        assert [path.read_bytes() for path in paths] == before
        assert len(list(tmp_path.iterdir())) == 6
        said = capsys.readouterr().out
        assert (
            ("written to" in said and "validated" in said)
            if missing
            else said == "nothing to do: no file was written\n"
        )
    other = tmp_path / "single.gguf"
    other.write_bytes(b"not checked")
    report = iqforge.quantize_model(
        split, other, "Q4_0", pure=True, shards=iqforge.Shards(partial=True)
    )
    assert other.read_bytes() == b"not checked" and not report.tensors


def test_only_missing_shards_are_written(split, tmp_path):
    options = {"pure": True, "shards": iqforge.Shards(keep_split=True, partial=True)}
    iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", **options)
    first, second, _ = shards(tmp_path)
    first.write_bytes(b"stays")
    second.unlink()
    report = iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", **options)
    assert [t.planned.target.name for t in report.tensors] == ["blk.3.ffn_up.weight"]
    assert first.read_bytes() == b"stays" and second.exists()


@pytest.mark.parametrize("after", [1, 3, 5])
def test_resumes_in_shards(split, tmp_path, after):
    options = {"pure": True, "shards": iqforge.Shards(keep_split=True)}
    expected = iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", **options)
    content = [path.read_bytes() for path in shards(tmp_path)]
    for path in shards(tmp_path):
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(
            split, tmp_path / "q.gguf", "Q4_0", progress=BreakAfter(after), **options
        )
    assert (
        not any(path.exists() for path in shards(tmp_path))
        and (tmp_path / "q.gguf.journal").exists()
    )
    heard = BreakAfter(0)
    assert (
        iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", progress=heard, **options)
        == expected
    )
    assert heard.resumed == after and [path.read_bytes() for path in shards(tmp_path)] == content
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("partial", [False, True])
def test_killed_while_shards_get_their_names(split, tmp_path, monkeypatch, partial):
    options = {"pure": True, "shards": iqforge.Shards(keep_split=True, partial=partial)}
    iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", **options)
    content = [path.read_bytes() for path in shards(tmp_path)]
    for path in shards(tmp_path)[1:]:
        path.unlink()
    real, calls = GGUFWriter.commit, []

    class Killed(BaseException):
        pass

    def killing(self):
        if calls:
            raise Killed
        calls.append(real(self))

    with monkeypatch.context() as patched:
        patched.setattr(GGUFWriter, "commit", killing)
        patched.setattr(resume.ResumableOutput, "leave", lambda self: self._journal.close())
        # A killed process removes nothing.
        patched.setattr(GGUFWriter, "abort", GGUFWriter.leave)
        with pytest.raises(Killed):
            iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", **options)
    heard = BreakAfter(0)
    iqforge.quantize_model(split, tmp_path / "q.gguf", "Q4_0", progress=heard, **options)
    assert heard.done == 0 and heard.resumed == (5 if partial else 8)
    assert [path.read_bytes() for path in shards(tmp_path)] == content and len(
        list(tmp_path.iterdir())
    ) == 6


def test_limits(split, tmp_path, capsys):
    assert (
        main(
            [
                "quantize",
                "--pure",
                "--split-max-tensors",
                "5",
                str(split),
                str(tmp_path / "q.gguf"),
                "q4_0",
            ]
        )
        == 0
    )
    assert [len(SingleFile(str(path)).header.tensors) for path in shards(tmp_path, 2)] == [5, 3]
    assert (
        main(
            [
                "quantize",
                "--pure",
                "--split-max-size",
                "7000",
                str(split),
                str(tmp_path / "r.gguf"),
                "q4_0",
            ]
        )
        == 0
    )
    assert len(list(tmp_path.glob("r-*.gguf"))) == 3  # 2304 bytes each
    with pytest.raises(UsageError, match="not both"):
        iqforge.Shards(keep_split=True, max_tensors=3)
    for given in (
        ["--split-max-tensors", "5"],
        ["--prune-layers", "0"],
        ["--override-kv", "a=int:1"],
        ["--save-plan", "p.json"],
    ):
        assert (
            main(["quantize", "--repack", *given, str(split), str(tmp_path / "s.gguf"), "q4_0"])
            == 1
        )
        assert "--repack" in capsys.readouterr().err
    folder = make_tiny_qwen3moe(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match=r"keep_split \(--keep-split\) takes a GGUF"):
        iqforge.quantize_model(
            folder, tmp_path / "c.gguf", "Q4_0", pure=True, shards=iqforge.Shards(keep_split=True)
        )


# ---- merged experts


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return iqforge.convert_model(make_tiny_qwen3moe(folder / "model"), folder / "moe.gguf", "bf16")


@pytest.mark.parametrize("type", ["Q8_0", "BF16", "Q4_0_R8"])
def test_merged_while_quantizing(experts, tmp_path, type):
    """Rows are quantized one by one, so merging before or after makes no difference."""
    options = {"pure": True, "provenance": False}
    iqforge.quantize_model(experts, tmp_path / "apart.gguf", type, **options)
    iqforge.merge_gate_up(tmp_path / "apart.gguf", tmp_path / "expected.gguf")
    iqforge.quantize_model(experts, tmp_path / "merged.gguf", type, gate_up="merge", **options)
    assert (tmp_path / "merged.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()
    iqforge.merge_gate_up(experts, tmp_path / "source.gguf")
    iqforge.quantize_model(
        tmp_path / "source.gguf", tmp_path / "split.gguf", type, gate_up="split", **options
    )
    assert contents(tmp_path / "split.gguf") == contents(tmp_path / "apart.gguf")
    with pytest.raises(UsageError, match="no merged gate and up"):
        iqforge.quantize_model(experts, tmp_path / "none.gguf", type, gate_up="part", **options)
    with pytest.raises(UsageError, match="of its experts are merged already"):
        iqforge.merge_gate_up(tmp_path / "source.gguf", tmp_path / "none.gguf")


def test_merged_experts_find_their_importances(experts, tmp_path):
    with open_gguf(experts) as source:
        ups = [t for t in source.tensors if "ffn_up_exps" in t.name]
        own = {
            t.name: Entry(
                np.random.default_rng(5).lognormal(size=(t.n_matrices, t.n_cols)),
                np.full(t.n_matrices, 9),
            )
            for t in ups
        }
    merged_names = {
        name.replace("ffn_up_exps", "ffn_gate_up_exps"): entry for name, entry in own.items()
    }
    files = []
    for number, entries in enumerate((own, merged_names)):
        files.append(tmp_path / f"{number}.gguf")
        report = iqforge.quantize_model(
            experts,
            files[-1],
            "Q4_K",
            Imatrix(entries),
            pure=True,
            gate_up="merge",
            provenance=False,
        )
        assert sum(t.weighted for t in report.tensors) == len(ups)
    assert contents(files[0]) == contents(files[1])


def test_merged_from_a_checkpoint_and_in_pieces(experts, tmp_path, monkeypatch):
    monkeypatch.setattr("iqforge.quantize.run.piece.PIECE_ELEMENTS", 3 * 256)
    folder = make_tiny_qwen3moe(tmp_path / "model")
    assert (
        main(
            ["quantize", "--pure", "--merge-gate-up", str(folder), str(tmp_path / "a.gguf"), "q8_0"]
        )
        == 0
    )
    monkeypatch.undo()
    iqforge.quantize_model(experts, tmp_path / "b.gguf", "Q8_0", pure=True, gate_up="merge")
    assert contents(tmp_path / "a.gguf") == contents(tmp_path / "b.gguf")


def test_biases_and_tensors_that_cannot_be_merged(tmp_path):
    def model(types=("F32", "F32"), ff=6) -> Path:
        tensors = [
            TensorInfo(
                f"blk.0.ffn_{half}_exps.{part}",
                (4, ff, 32) if part == "weight" else (4, ff),
                ggml_type(kind),
            )
            for part in ("weight", "bias")
            for half, kind in zip(("gate", "up"), types)
        ]
        with GGUFWriter(tmp_path / "x.gguf", KEYS, tensors) as sink:
            fill(sink, tensors)
        return tmp_path / "x.gguf"

    iqforge.merge_gate_up(model(), tmp_path / "expected.gguf")
    iqforge.quantize_model(
        tmp_path / "x.gguf", tmp_path / "y.gguf", "F32", pure=True, gate_up="merge"
    )
    assert contents(tmp_path / "y.gguf") == contents(tmp_path / "expected.gguf")
    iqforge.quantize_model(
        tmp_path / "expected.gguf", tmp_path / "z.gguf", "F32", pure=True, gate_up="split"
    )
    assert contents(tmp_path / "z.gguf") == contents(tmp_path / "x.gguf")
    with pytest.raises(UnsupportedTypeError, match="only halves of one type"):
        iqforge.quantize_model(
            model(("F32", "F16")), tmp_path / "y.gguf", "Q8_0", pure=True, gate_up="merge"
        )
    with pytest.raises(UsageError, match="expected merge or split"):
        iqforge.quantize_model(model(), tmp_path / "y.gguf", "Q8_0", pure=True, gate_up="both")


def test_merged_in_the_shards_of_the_source(experts, tmp_path):
    with open_gguf(experts) as source:
        count = len(source.tensors)
    first = iqforge.split_model(experts, tmp_path / "in", max_tensors=count // 3 + 1)[0]
    report = iqforge.quantize_model(
        first,
        tmp_path / "q.gguf",
        "Q8_0",
        pure=True,
        gate_up="merge",
        shards=iqforge.Shards(keep_split=True),
    )
    with open_gguf(tmp_path / "q-00001-of-00003.gguf") as made:
        assert [t.name for t in made.tensors] == [
            t.planned.target.name for t in report.tensors
        ] and len(made.shards) == 3
    iqforge.quantize_model(experts, tmp_path / "whole.gguf", "Q8_0", pure=True, gate_up="merge")
    assert contents(tmp_path / "q-00001-of-00003.gguf") == contents(tmp_path / "whole.gguf")
