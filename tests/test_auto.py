"""`iqforge auto`: from a checkpoint to a file of a given size with its card, resumed with the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import iqforge
import pytest
import yaml
from iqforge import api
from iqforge.cli import main
from iqforge.errors import UsageError
from iqforge.proof.auto import Auto, AutoOptions
from iqforge.proof.auto_plan import Target
from iqforge.runtime.options import LoadOptions

from .hub_server import COMMIT, Hub
from .tiny_checkpoint import PROSE, make_tiny_llama

TYPES = ("Q4_0", "Q5_0", "Q8_0")  # whose searches compile in no time
LICENSE = "---\nlicense: other\nlicense_name: tiny\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("auto") / "tiny", dtype="f32")
    (folder / "README.md").write_text(LICENSE)
    text = folder.parent / "text.txt"
    text.write_text("\n".join(PROSE.splitlines() * 12))
    return folder, text


def words(checkpoint, out, *more):
    folder, text = checkpoint
    target = (
        [] if any(word.startswith(("--target", "--fit")) for word in more) else ["--target-bpw"]
    )
    return [
        *("auto", str(folder), "-f", str(text), "-o", str(out), "-c", "64", "--device", "cpu"),
        *("--target-types", ",".join(TYPES), "--test-chunks", "3"),
        *(target + ["6"] if target else []),
        *more,
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def size_for(checkpoint, share=0.5):
    """Return a size between those of all-Q4_0 and all-Q8_0."""
    with iqforge.open_source(checkpoint[0]) as source:
        matrices = sum(t.n_elements for t in source.tensors if len(t.shape) > 1)
        rest = sum(t.n_elements for t in source.tensors if len(t.shape) == 1)
    return int(matrices * (4.5 + share * 4) / 8 + 4 * rest) + 40_000


def test_a_checkpoint_becomes_a_file_with_proof(checkpoint, tmp_path, capsys):
    size = size_for(checkpoint)
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--target-size", str(size))) == 0
    printed = capsys.readouterr().out
    # What it is going to do comes first, with time and space.
    plan = printed[: printed.index("[1]")]
    assert all(f"{n}. " in plan for n in range(1, 6)) and re.search(r"in all, about +\d", plan)
    assert not list(out.rglob("*.part"))
    file = out / f"tiny-{size}.gguf"
    assert 0.995 * size <= file.stat().st_size <= size
    assert all(not one.fault for one in iqforge.validate_model(file))
    figures = json.loads((out / "figures.json").read_text())["models"][0]
    text = figures["texts"][0]
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "other" and front["license_name"] == "tiny"
    assert "gguf" in front["tags"] and "base_model" not in front
    assert f"{text['kld'][0]:.5f}" in card and sha256(file) in card
    assert str(checkpoint[1].parent) not in card  # no paths of this machine
    page = (out / "compare.html").read_text()
    assert sha256(file) in page and str(checkpoint[1].parent) not in page
    # The text was divided: what is measured was not calibrated with.
    test = (out / "work" / "test" / "text.txt").read_text()
    assert checkpoint[1].read_text().endswith(test.rstrip("\n"))
    assert 0.15 < len(test) / len(checkpoint[1].read_text()) < 0.25


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert main(words(checkpoint, out)) == 0
    return out


def test_what_is_finished_is_not_repeated(whole, checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    stages = out / "work" / "stages.json"
    stages.write_text(stages.read_text().replace(str(whole), str(out)))
    [file] = out.glob("*bpw.gguf")
    before, times = sha256(file), {p: p.stat().st_mtime_ns for p in out.iterdir() if p.is_file()}
    assert main(words(checkpoint, out)) == 0
    assert capsys.readouterr().out.count("already done") == 5
    assert file.stat().st_mtime_ns == times[file]
    file.unlink()
    assert main(words(checkpoint, out)) == 0
    assert capsys.readouterr().out.count("already done") == 4
    assert sha256(file) == before
    # Another target starts from the importance matrix.
    assert main(words(checkpoint, out, "--target-bpw", "7")) == 0
    assert capsys.readouterr().out.count("already done") == 2
    assert len(list(out.glob("*bpw.gguf"))) == 2


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("collect_imatrix", marks=pytest.mark.full),
        "quantize_model",
        pytest.param("compare_models", marks=pytest.mark.full),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bytes(
    stage, whole, checkpoint, tmp_path, monkeypatch
):
    real = getattr(api, stage)

    def stopped(*args, **keywords):
        if keywords.get("dry_run"):
            return real(*args, **keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, stage, stopped)
    out = tmp_path / "elsewhere" / "out"
    options = AutoOptions((str(checkpoint[1]),), n_ctx=64, test_chunks=3, types=TYPES)

    def chain():
        load = LoadOptions(device="cpu")
        return Auto(api, str(checkpoint[0]), out, Target(bpw=6), options, load)

    with pytest.raises(KeyboardInterrupt):
        chain().run()
    assert not (out / "README.md").exists()
    monkeypatch.undo()
    chain().run()
    for name in ("tiny-6bpw.gguf", "tiny.imatrix.gguf", "tiny-6bpw.plan.json"):
        assert sha256(out / name) == sha256(whole / name), name


@pytest.mark.full
def test_a_name_on_the_hub_becomes_a_file_with_proof(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Hub(checkpoint[0]) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("NO_PROXY", "*")
        words = ["auto", "--remote", "org/model", "--target-bpw", "6", "-f", str(checkpoint[1])]
        words += ["--target-types", ",".join(TYPES), "-c", "64", "--device", "cpu", "--clean"]
        assert main(words) == 0
    folder = tmp_path / "model-gguf"
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/model"
    assert f"--remote org/model@{COMMIT}" in card
    assert (folder / "model-6bpw.gguf").exists() and not (folder / "work").exists()


def test_a_file_that_fits_a_gpu(checkpoint, tmp_path):
    options = AutoOptions((str(checkpoint[1]),))
    gpu = (512 << 20) + (1 << 30)
    chain, longer = (
        Auto(
            api,
            str(checkpoint[0]),
            tmp_path,
            Target(gpu=gpu, context=context),
            options,
            LoadOptions(device="cpu"),
        )
        for context in (256, 2048)
    )
    assert 0 < longer.aim.n_bytes < chain.aim.n_bytes < 1 << 30
    with iqforge.load_model(checkpoint[0]) as model:
        [memory] = model.memory(context=2048)
    assert longer.aim.n_bytes + memory.cache + memory.compute == gpu - (512 << 20)
    with pytest.raises(UsageError, match="nothing is left for weights"):
        Auto(
            api,
            str(checkpoint[0]),
            tmp_path,
            Target(gpu="1M"),
            options,
            LoadOptions(device="cpu"),
        )


def test_a_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    assert main(words(checkpoint, tmp_path / "out", "--dry-run")) == 0
    assert "in all, about" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_targets_exclude_each_other(checkpoint, capsys):
    with pytest.raises(UsageError, match="one target"):
        Target(size="1G", bpw=4.0)
    with pytest.raises(UsageError, match="one target"):
        Target()
    with pytest.raises(SystemExit):
        main(["auto", str(checkpoint[0])])
    assert main(["auto", "--target-bpw", "4"]) != 0
    assert "CHECKPOINT" in capsys.readouterr().err
