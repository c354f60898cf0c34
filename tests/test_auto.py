"""`iqforge auto`: from a checkpoint to a file of a given size with its card, resumed with the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path

import iqforge
import pytest
import yaml
from iqforge import api
from iqforge.cli import main
from iqforge.errors import IqforgeError, OutputError, UsageError
from iqforge.proof import auto, auto_compiling
from iqforge.proof.auto_options import AutoOptions, Target
from iqforge.proof.auto_plan import probe_layers
from iqforge.proof.auto_texts import sample
from iqforge.quantize.run import estimate
from iqforge.runtime.model import Model
from iqforge.runtime.options import LoadOptions

from .hub_server import COMMIT, Hub
from .tiny_checkpoint import PROSE, make_tiny_llama

TYPES = ("Q4_0", "Q5_0", "Q8_0")  # whose searches compile in no time
LICENSE = "---\nlicense: other\nlicense_name: tiny\n---\n# Tiny\n"


@pytest.fixture(autouse=True, scope="module")
def rough_estimates():
    """Try each type for a moment: how near estimates are is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "_TIMED_SECONDS", 0.02)
        yield


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
        *([] if "--sensitivity" in more else ["--no-sensitivity"]),
        *(target + ["6"] if target else []),
        *(word for word in more if word != "--sensitivity"),
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
    assert "types ranked by errors and roles" in printed and "predicted" not in printed
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


@pytest.mark.full
def test_types_are_chosen_by_what_each_tensor_matters(whole, checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(checkpoint, out, "--sensitivity")) == 0
    measured = json.loads((out / "tiny.sensitivity.json").read_text())
    with iqforge.open_source(checkpoint[0]) as source:
        matrices = {t.name for t in source.tensors if len(t.shape) > 1}
    assert {name for probe in measured["probes"] for name in probe["tensors"]} == matrices
    assert "| Sensitivities | tiny.sensitivity.json |" in (out / "README.md").read_text()
    assert "| Sensitivities | roles |" in (whole / "README.md").read_text()
    # Another target measures nothing again.
    capsys.readouterr()
    assert main(words(checkpoint, out, "--sensitivity", "--target-bpw", "7")) == 0
    assert capsys.readouterr().out.count("already done") == 3


def test_when_sensitivities_are_measured(checkpoint, tmp_path, monkeypatch):
    def stages(**options):
        chain = auto.Auto(
            api,
            str(checkpoint[0]),
            tmp_path,
            AutoOptions(target_bpw=6, texts=[checkpoint[1]], types=TYPES, **options),
            LoadOptions("cpu"),
        )
        return list(chain.keys)

    assert stages() == ["convert", "imatrix", "sensitivity", "choose", "quantize", "compare"]
    assert "sensitivity" not in stages(sensitivity=False)
    assert "sensitivity" not in stages(damage=checkpoint[1])
    monkeypatch.setattr(auto, "_MOST_MEASURED", 1000)
    assert "sensitivity" not in stages()
    assert [probe_layers(n) for n in (1, 48, 49, 560)] == [1, 1, 2, 12]


def test_a_sample_has_something_of_every_text():
    assert sample(["abc", "é" * 9, "x\ny" * 9], 12) == "abc\néé\nx\nyx\n"


STAGES = ["collect_imatrix", "recipe_for_target", "quantize_model", "compare_models"]


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("collect_imatrix", marks=pytest.mark.full),
        "quantize_model",
        pytest.param("compare_models", marks=pytest.mark.full),
    ],
)
def test_an_interrupted_run_ends_with_the_same_bytes(
    stage, whole, checkpoint, tmp_path, monkeypatch, capsys
):
    real = getattr(api, stage)

    def stopped(*args, **keywords):
        if keywords.get("dry_run"):
            return real(*args, **keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, stage, stopped)
    out = tmp_path / "elsewhere" / "out"
    options = AutoOptions(
        target_bpw=6,
        texts=[checkpoint[1]],
        n_ctx=64,
        test_chunks=3,
        types=TYPES,
        sensitivity=False,
    )
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        iqforge.auto_model(checkpoint[0], out, options=options)
    assert not (out / "README.md").exists()
    monkeypatch.undo()
    assert repr(iqforge.plan_auto(checkpoint[0], out, options=options)).startswith("<AutoPlan ")
    result = iqforge.auto_model(checkpoint[0], out, options=options, on_line=lines.append)
    assert sum("already done" in line for line in lines) == STAGES.index(stage) + 1
    assert result.model == out / "tiny-6bpw.gguf" and result.card == out / "README.md"
    assert re.fullmatch(r"<AutoResult .* bits per weight, mean KLD 0\.\d{5}: .*>", repr(result))
    assert capsys.readouterr() == ("", "")  # nothing is printed from Python
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
        words += ["--no-sensitivity"]
        assert main(words) == 0
    folder = tmp_path / "model-gguf"
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "org/model"
    assert f"--remote org/model@{COMMIT}" in card
    assert (folder / "model-6bpw.gguf").exists() and not (folder / "work").exists()


def test_a_file_that_fits_a_gpu(checkpoint, tmp_path):
    gpu = (512 << 20) + (1 << 30)

    def plan(gpu, context):
        return iqforge.plan_auto(
            checkpoint[0],
            tmp_path,
            fit_gpu=gpu,
            context=context,
            texts=[checkpoint[1]],
        )

    aim, longer = plan(gpu, 256).aim, plan(gpu, 2048).aim
    assert 0 < longer.n_bytes < aim.n_bytes < 1 << 30
    with iqforge.load_model(checkpoint[0]) as model:
        [memory] = model.memory(context=2048)
    assert longer.n_bytes + memory.cache + memory.compute == gpu - (512 << 20)
    with pytest.raises(UsageError, match="nothing is left for weights"):
        plan("1M", 8192)


@pytest.mark.parametrize(
    "target, words",
    [
        ({"target_size": 1000}, "smallest possible result has [0-9]+ bytes"),
        ({"target_bpw": 4.4999}, r"smallest possible result has 4\.5\d+ bits per weight"),
        ({"target_bpw": float("nan")}, "target_bpw is nan, expected a finite number"),
        ({"target_bpw": -3}, "smallest possible result"),
        ({"target_size": "12X"}, "invalid size"),
        ({"target_size": 10**6, "target_bpw": 4}, "one target"),
        ({}, "one target"),
        ({"target_bpw": 6, "types": ["Q4_9"]}, "Q4_9"),
        ({"target_bpw": 6, "name": "a/b"}, "cannot be that of a file"),
        ({"target_bpw": 6, "texts": ["short.txt"]}, "too few lines"),
        ({"target_bpw": 6, "lora": ["a.gguf"]}, "export-lora"),
        ({"target_bpw": 6, "target_bwp": 5}, "auto has no option 'target_bwp'.* mean 'target_bpw'"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is(
    target, words, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("One line.")
    with pytest.raises(IqforgeError, match=words):
        iqforge.plan_auto(
            checkpoint[0], "out", **{"types": TYPES, "texts": [checkpoint[1]]} | target
        )
    assert not Path("out").exists()


def test_what_is_read_is_not_replaced(checkpoint, tmp_path):
    text = tmp_path / "README.md"  # the name of the model card
    text.write_bytes(checkpoint[1].read_bytes())
    for folder, source in ((tmp_path, checkpoint[0]), (checkpoint[0], checkpoint[0])):
        with pytest.raises(OutputError, match="is the same file as the input"):
            iqforge.plan_auto(source, folder, target_bpw=6, types=TYPES, texts=[text])


def test_a_target_above_every_type(checkpoint, tmp_path, caplog):
    plan = iqforge.plan_auto(checkpoint[0], tmp_path, target_size="50T", types=TYPES)
    assert "the largest possible result has" in caplog.text
    [size] = [stage.n_bytes for stage in plan.stages if stage.name == "quantize"]
    assert size < 10**7 and "in all, about" in str(plan)


def test_files_of_others_in_work_stay(whole, checkpoint, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "work" / "notes.txt").write_text("mine")
    assert main(words(checkpoint, out, "--clean")) == 0
    assert [path.name for path in (out / "work").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_the_command_of_a_card_names_all_that_matters(whole, checkpoint, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    assert main(words(checkpoint, out, "--model-name", "other", "--chunks", "4")) == 0
    lines = (out / "README.md").read_text().splitlines()
    [command] = [line for line in lines if line.startswith("iqforge auto")]
    assert command == (
        "iqforge auto tiny --target-bpw 6 -f text.txt --target-types Q4_0,Q5_0,Q8_0"
        " --no-sensitivity --model-name other -c 64 --chunks 4 --test-chunks 3"
    )


def test_a_quantized_file_is_noted(checkpoint, tmp_path, caplog):
    file = tmp_path / "q8.gguf"
    iqforge.convert_model(checkpoint[0], file, outtype="q8_0")
    iqforge.plan_auto(file, tmp_path, target_bpw=6, types=TYPES, texts=[checkpoint[1]])
    assert "has weights in Q8_0 already" in caplog.text


def test_a_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    assert main(words(checkpoint, tmp_path / "out", "--dry-run")) == 0
    assert "in all, about" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_compiling_is_announced_in_a_line_of_its_own(checkpoint, tmp_path, monkeypatch, capsys):
    """Searches of all types to choose from, and of probes; GPUs have their own."""
    monkeypatch.setattr(auto_compiling.CompileWatch, "factor", 1.0)
    monkeypatch.setattr(auto_compiling, "missing_tasks", list)  # as on a new machine
    monkeypatch.setattr(Model, "count_missing_code", lambda model: 5)
    asked = []

    def seconds(missing):
        asked.append({(task.type, task.weighted) for task in missing if task.kind == "search"})
        return 100.0

    monkeypatch.setattr(auto_compiling, "compile_seconds", seconds)
    make = partial(iqforge.plan_auto, checkpoint[0], tmp_path, target_bpw=6, texts=[checkpoint[1]])
    plan = make(types=TYPES)
    stages = sum(stage.seconds for stage in plan.stages)
    types_of_products = len(TYPES) + 1
    assert plan.compiling == pytest.approx(100 + 5 * 0.6 + types_of_products * 1.1)
    assert plan.seconds == pytest.approx(stages + plan.compiling)
    assert re.search("compiling, once +1.[78] min", str(plan))
    chosen = {(type, weighted) for type in TYPES for weighted in (True, False)}
    assert {type for type, _ in asked.pop() - chosen} == {"IQ3_K"}
    make(types=TYPES, sensitivity=False)
    assert asked.pop() == chosen
    monkeypatch.setattr(auto_compiling, "missing_tasks", lambda tasks: [])
    monkeypatch.setattr(auto_compiling, "compile_seconds", lambda missing: 0.0)
    monkeypatch.setattr(Model, "count_missing_code", lambda model: 0)
    plan = make(types=TYPES)
    assert plan.compiling == 0 and "compiling" not in str(plan)


def test_targets_exclude_each_other(checkpoint, capsys):
    with pytest.raises(UsageError, match="one target"):
        Target(size="1G", bpw=4.0)
    with pytest.raises(UsageError, match="one target"):
        Target()
    with pytest.raises(SystemExit):
        main(["auto", str(checkpoint[0])])
    assert main(["auto", "--target-bpw", "4"]) != 0
    assert "CHECKPOINT" in capsys.readouterr().err
